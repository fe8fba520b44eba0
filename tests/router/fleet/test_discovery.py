"""Discovery of workers and of their prompt formats."""

import asyncio
import re
import socket
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.router.harness import Fleet, eventually
from tests.router.prompt_format import make_format

from fairlead_common.discovery import DiscoveryError, DnsSource, FileSource, StaticSource, create_source
from fairlead_router.config import RouterConfig, read_config
from fairlead_router.fleet.discovery import follow_discovery
from fairlead_router.fleet.workers import WorkerTable


async def test_the_scheme_selects_the_source(tmp_path: Path) -> None:
    listed = tmp_path / "workers"
    listed.write_text("# ours\n127.0.0.1:1\n\n[::1]:2  # v6\n")
    assert await create_source(f"file://{listed}").addresses() == {"127.0.0.1:1", "[::1]:2"}
    assert await create_source("static://a:1, b:2").addresses() == {"a:1", "b:2"}
    assert isinstance(create_source("dns://name.ns.svc:8000"), DnsSource)
    assert "127.0.0.1:8000" in await DnsSource("localhost", 8000).addresses()


@pytest.mark.parametrize("wrong", ["dns://noport", "dns://a:99999", "dns://[::1", "static://nonsense", "static://a:99999", "static://a:²"])
def test_an_invalid_source_is_named_in_the_error(wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong.split("//")[1])):
        create_source(wrong)


async def test_an_unreadable_source_is_unresolved_and_not_empty(tmp_path: Path) -> None:
    listed = tmp_path / "workers"
    with pytest.raises(DiscoveryError):
        await FileSource(listed).addresses()
    listed.write_text("not an address\n")
    with pytest.raises(DiscoveryError, match="not an address"):
        await FileSource(listed).addresses()
    with pytest.raises(DiscoveryError):
        await DnsSource("no-such-host.invalid", 1).addresses()
    with pytest.raises(ValueError, match="names no worker"):
        StaticSource("")


async def test_known_workers_stay_while_discovery_has_no_answer(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, workers=fleet.list_in_file(worker))
    fleet.file.unlink()
    assert [(await router.complete(f"p{number}")).status_code for number in range(5)] == [200] * 5


async def test_the_reason_why_a_worker_was_never_ready_is_logged(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fairlead_router.fleet.poller")
    worker = await fleet.worker()
    await worker.kill()
    await fleet.router(worker, ready=0)
    await eventually(lambda: f"worker {worker.address} is not ready: no connection" in caplog.text, "the reason is logged")


async def test_workers_are_found_by_dns_name(fleet: Fleet) -> None:
    worker = await fleet.worker()
    port = worker.address.split(":")[1]
    router = await fleet.router(workers=f"dns://localhost:{port}", ready=1)
    assert [(await router.complete(f"p{number}")).status_code for number in range(4)] == [200] * 4


async def test_while_two_models_are_served_each_worker_gets_tokens_of_its_own_format(fleet: Fleet) -> None:
    """During a rollout that changes the model, tokens of one format must not reach a worker of the other."""
    old = await fleet.worker()
    new = await fleet.worker(format=make_format("newer", "r2"))
    router = await fleet.router(old, new, policy="RoundRobin")
    router.server.router.prompts._tokenize = True
    for number in range(4):
        answer = await router.client.post("/v1/completions", json={"prompt": f"p{number}"})
        assert answer.status_code == 200
    kinds = [{request.tokens is None for request in worker.received} for worker in (old, new)]
    assert sorted(kinds, key=str) == [{False}, {True}]
    models = (await router.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["newer", "stand-in"]


async def test_the_format_is_fetched_again_from_a_worker_that_returns_with_another_model(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    worker.ready = False
    await router.usable(0)
    worker.format = make_format("newer", "r2")
    worker.ready = True
    await router.usable(1)
    models = (await router.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["newer"]


def test_flags_win_over_the_environment_and_the_last_one_given_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLEAD_PORT", "1")
    monkeypatch.setenv("FAIRLEAD_POLICY", "Session")
    monkeypatch.setenv("FAIRLEAD_REDIS_URL", "redis://user:hunter2@host:6379/0")
    config = read_config(["--workers", "static://a:1", "--port", "2", "--port", "3"])
    assert config.port == 3 and config.policy == "Session"
    assert "hunter2" not in str(config.describe()) and "hunter2" not in repr(config)
    odd = RouterConfig(workers="static://a:1", redis_url="rediss://user:hunt@er2@host:6379/0?password=hunter3")
    assert "er2" not in str(odd.describe()) and "hunter" not in str(odd.describe())
    with pytest.raises(ValidationError):
        read_config(["--workers", "ftp://a"])


async def test_discovery_survives_any_exception_of_a_source(fleet: Fleet) -> None:
    worker = await fleet.worker()
    fleet.file.write_bytes(b"\xff\xfe no text\n")
    with pytest.raises(DiscoveryError):
        await FileSource(fleet.file).addresses()
    table, answers = WorkerTable(), iter([UnicodeError("label too long"), {worker.address}])

    class FailingSource:
        async def addresses(self) -> set[str]:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    following = asyncio.create_task(follow_discovery(FailingSource(), table, 0.01, asyncio.Event()))
    try:
        await eventually(lambda: table.get(worker.address) is not None, "it asked again")
    finally:
        following.cancel()


async def test_a_dns_failure_for_one_address_family_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the addresses of the other family would replace those of every known worker."""

    async def getaddrinfo(host: str, port: int, *, family: int, type: int) -> list:
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(family, type, 6, "", ("fd00::7", port, 0, 0))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    with pytest.raises(DiscoveryError, match="Temporary failure"):
        await DnsSource("workers", 8000).addresses()
