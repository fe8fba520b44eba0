"""Service classes at a router: the choice of a class, the headers for the worker, and the metrics."""

import json
import logging
import uuid
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.routing.test_prefix_aware import start_fleet
from tests.router.stand_in_worker import Received
from tests.router.tenancy.test_access import ANNA, BORIS, bearer, guarded
from tests.servers.redis_server import RedisServer

from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.config import read_config
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call, Outcome, RequestHead
from fairlead_router.request.prompts import estimate_prompt
from fairlead_router.router import Router
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.service_classes import BATCH, ServiceClass, ServiceClasses
from fairlead_router.serving.request_handler import worker_headers
from fairlead_router.serving.slo_report import SloReport
from fairlead_router.tenancy.charge import UsageMeter
from fairlead_router.tenancy.tenants import LOWEST, Caller, KeyFileError, Tenant, read_keys
from fairlead_router.wire.held_stream import HeldStream

CHAT = {"name": "chat", "ttftMilliseconds": 60_000, "ttftMillisecondsPerThousandTokens": 1000}
CLASSES = json.dumps([{"name": "urgent", "priority": -10, "ttftMilliseconds": 30_000}, CHAT, {"name": "bulk", "priority": 7}])


async def ask(router: RunningRouter, name: str = "", key: str = "", prompt: str = "hello there", **fields: Any) -> Any:
    headers = {"x-slo-class": name} if name else {}
    return await router.client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers | (bearer(key) if key else {}))


def only(received: list[Received]) -> dict[str, str]:
    (one,) = received
    received.clear()
    return one.headers


async def test_a_request_gets_its_class_from_the_header_or_the_default(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, slo_classes=CLASSES, default_slo_class="chat")
    assert (await ask(router)).status_code == 200
    seen = only(worker.received)
    assert seen["x-fairlead-priority"] == "0"
    assert (await ask(router, "urgent", priority=99)).status_code == 200
    seen = only(worker.received)
    assert seen["x-fairlead-priority"] == "-10", "the class decides, not the body"
    for name, priority in (("bulk", "7"), ("batch", "1000")):
        assert (await ask(router, name)).status_code == 200
        seen = only(worker.received)
        assert seen["x-fairlead-priority"] == priority
        assert "x-slo-class" not in seen, "workers do not see the header"


@pytest.mark.parametrize("tenant", ["", "anna"])
def test_a_worker_gets_each_of_the_routers_headers_once(tenant: str) -> None:
    """Also for a tenant with a class, and for a batch: which of two values counts is the server's choice."""
    prompt = estimate_prompt(10, "aa")
    for caller in (Caller(Tenant(tenant), priority=-5), Caller(Tenant(tenant), "batch", LOWEST, slo_class="batch")):
        names = [name for name, _ in worker_headers(prompt, caller, BATCH)]
        assert sorted(names) == sorted(set(names)) and b"x-fairlead-priority" in names


async def test_without_classes_nothing_changes_but_batch_exists(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker)
    assert (await ask(router, priority=3)).status_code == 200
    assert "x-fairlead-priority" not in only(worker.received)
    assert (await ask(router, "batch")).status_code == 200
    assert only(worker.received)["x-fairlead-priority"] == "1000"


async def test_an_unknown_class_is_refused_with_the_names_of_all(fleet: Fleet) -> None:
    worker = await fleet.worker()
    router = await fleet.router(worker, slo_classes=CLASSES)
    answer = await ask(router, "caht")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "unknown_slo_class" and not worker.received
    assert error["message"] == "X-SLO-Class: there is no class 'caht'; use one of batch, urgent, chat, bulk."


async def test_a_key_has_a_class_and_can_choose_none_that_is_more_urgent(fleet: Fleet, tmp_path: Path) -> None:
    tenants = {"anna": {"sloClass": "chat"}, "boris": {"priority": 5}}
    router, worker = await guarded(fleet, tmp_path, tenants, slo_classes=CLASSES, default_slo_class="urgent")
    assert (await ask(router, key=ANNA)).status_code == 200
    assert only(worker.received)["x-fairlead-priority"] == "0", "the class of the key, not the default"
    for key, name, allowed in (
        (ANNA, "urgent", "batch, chat, bulk"),
        (BORIS, "urgent", "batch, bulk"),
        (BORIS, "chat", "batch, bulk"),
    ):
        answer = await ask(router, name, key)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "slo_class_not_allowed"
        assert answer.json()["error"]["message"].endswith(f"use one of {allowed}.")
    assert not worker.received
    for key, name, priority in ((ANNA, "bulk", "7"), (BORIS, "batch", "1000"), (BORIS, "", "5")):
        assert (await ask(router, name, key)).status_code == 200
        assert only(worker.received)["x-fairlead-priority"] == priority


async def test_only_uncached_tokens_count_where_the_router_mirrors_the_index(fleet: Fleet) -> None:
    """A prompt of 3,008 tokens takes three seconds, and the class allows one."""
    classes = json.dumps([{"name": "chat", "ttftMilliseconds": 1000}])
    with RedisServer() as redis:
        router, (worker,) = await start_fleet(fleet, redis, f"tests/{uuid.uuid4().hex[:8]}", 1, "mirror", slo_classes=classes)
        worker.load = {"prefill_rate": 1000.0, "running": 1}
        await eventually(lambda: all(one.load.running for one in router.table), "the router knows the worker's rate")
        prompt = "a long document " * 188
        answer = await ask(router, "chat", prompt=prompt)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "slo_unattainable"
        assert "takes 30" in answer.text and "its bound is 1000 ms" in answer.text and "retry-after" not in answer.headers
        assert (await ask(router, prompt=prompt)).status_code == 200, "a request without a class warms the cache"
        policy = router.server.router.policy
        assert isinstance(policy, PrefixAware)
        hashes = block_hashes(prompt_root(worker.format), worker.received[-1].tokens, 16)
        request = RoutingRequest(len(prompt), hashes)
        await eventually(lambda: policy.predict(request).get(worker.address) == 3008, "the mirror knows the blocks")
        assert (await ask(router, "chat", prompt=prompt)).status_code == 200


async def test_a_rejection_shortly_before_the_bound_names_the_margin(fleet: Fleet) -> None:
    """A prompt of 560 tokens takes 56 s after 3 s of backlog, and the class allows 60.56: more than nine tenths."""
    worker = await fleet.worker()
    worker.load = {"prefill_rate": 10.0, "running": 1, "backlog_tokens": 30}
    router = await fleet.router(worker, slo_classes=CLASSES)
    await eventually(lambda: all(one.load.running for one in router.table), "the router knows the worker's rate")
    answer = await ask(router, "chat", prompt=list(range(560)))
    assert answer.status_code == 429 and "its bound is 60560 ms, less a margin of a tenth" in answer.text


def key_file(**fields: Any) -> bytes:
    keys = [{"name": "one", "sha256": sha256(b"key").hexdigest(), **fields}]
    return json.dumps({"saltSecret": "s" * 32, "tenants": {"anna": {"keys": keys, "sloClass": "chat"}}}).encode()


def test_the_class_of_a_key_goes_before_that_of_its_tenant_and_must_exist() -> None:
    assert next(iter(read_keys(key_file(), ["chat"]).values())).slo_class == "chat"
    assert next(iter(read_keys(key_file(sloClass="bulk"), ["chat", "bulk"]).values())).slo_class == "bulk"
    assert next(iter(read_keys(key_file(sloClass="bulk")).values())).slo_class == "bulk", (
        "without a router there is nothing to check it with"
    )
    with pytest.raises(KeyFileError, match="sloClass of key one of tenant anna is none of the service's classes: batch, chat"):
        read_keys(key_file(sloClass="secret-name"), ["batch", "chat"])


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ("chat", "give a JSON list such as"),
        ('{"name": "chat"}', "give a JSON list such as"),
        ('[{"name": "Chat"}]', r"\[0\]\.name must be lower-case letters"),
        ('[{"name": "a"}, {"priority": 1}]', r"\[1\]\.name is missing: add it"),
        ('[{"name": "a", "ttft": 5}]', r"\[0\]\.ttft is unknown: use name, priority, ttftMilliseconds"),
        ('[{"name": "a", "ttftMilliseconds": 0}]', r"\[0\]\.ttftMilliseconds .*greater than or equal to 1 \(got '0'\)"),
        ('[{"name": "a", "priority": "1"}]', r"\[0\]\.priority .*integer"),
        ('[{"name": "a", "ttftMillisecondsPerThousandTokens": 5}]', "needs ttftMilliseconds"),
        ('[{"name": "a"}, {"name": "a"}]', "the name 'a' occurs twice: rename one class"),
        (json.dumps([{"name": f"c{number}"} for number in range(17)]), "at most 16"),
    ],
)
def test_an_invalid_flag_names_the_key_and_the_fix(classes: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        read_config(["--workers=static://a:1", f"--slo-classes={classes}"])


def test_an_unknown_default_class_and_redirects_are_refused_at_the_start() -> None:
    with pytest.raises(ValidationError, match="no class has this name: add it to --slo-classes, or choose one of batch, urgent"):
        read_config(["--workers=static://a:1", f"--slo-classes={CLASSES}", "--default-slo-class=caht"])
    with pytest.raises(ValueError, match="redirect goes past --slo-classes"):
        Router(read_config(["--workers=static://a:1", f"--slo-classes={CLASSES}", "--forwarding-mode=redirect"]))


async def test_requests_are_counted_by_class_and_the_log_names_it(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    router = await fleet.router(await fleet.worker(), slo_classes=CLASSES)
    with caplog.at_level(logging.INFO, "fairlead_router.access"):
        for name, stream in (("chat", True), ("chat", False), ("batch", True), ("", True)):
            assert (await ask(router, name, stream=stream)).status_code == 200
        await eventually(lambda: caplog.text.count(" class=") == 4, "the access log is flushed")
    for name in ("chat", "batch", "-"):
        assert f" class={name} worker=" in caplog.text
    text = (await router.server.router.metrics.render()).decode()
    for metric, name, value in (("requests", "chat", 2), ("good_requests", "chat", 2), ("requests", "batch", 1), ("rejected", "chat", 0)):
        assert f'fairlead_router_slo_{metric}_total{{class="{name}"}} {value}.0' in text


@pytest.mark.parametrize(
    ("change", "good", "missed"),
    [
        ({}, True, ()),
        ({"status": 503}, False, ()),
        ({"first_byte_at": None}, False, ()),
        ({"ending": "broken"}, False, ()),
        ({"ending": "client_gone"}, True, ()),
        ({"first_byte_at": 101.31}, False, ("ttft",)),  # the bound is 1 s, and 0.3 s for 3,000 uncached tokens
        ({"first_byte_at": 101.29}, True, ()),
        ({"first_byte_at": 101.29, "cached_tokens": 2000}, False, ("ttft",)),
        ({"first_byte_at": 109.0, "held_stream": None}, True, ()),  # an answer in one piece shows no first token
        ({"tokens": 21}, True, ()),  # 20 intervals of 50 ms in the last second
        ({"tokens": 20}, False, ("itl",)),
        ({"first_byte_at": 101.31, "tokens": 10}, False, ("ttft", "itl")),
        ({"status": 503, "first_byte_at": 101.31}, False, ()),  # a failure is no slow answer
    ],
)
def test_goodput_needs_both_bounds_and_each_missed_one_is_counted(change: dict[str, Any], good: bool, missed: tuple[str, ...]) -> None:
    service_class = ServiceClass(name="chat", ttft_milliseconds=1000, ttft_milliseconds_per_thousand_tokens=100, itl_milliseconds=50)
    call = Call(RequestHead("POST", "/v1/completions", "id", [], started_at=100.0), Outcome(200, prompt_tokens=3000, first_byte_at=101.0))
    call.service_class, call.held_stream = service_class, cast(HeldStream, object())
    call.meter = UsageMeter(3000)
    call.meter.output = change.pop("tokens", 0)
    for name, value in change.items():
        setattr(call if name == "held_stream" else call.outcome, name, value)
    metrics = Metrics(WorkerTable())
    SloReport(metrics, ServiceClasses([service_class])).record(call, now=102.0)
    count = metrics.registry.get_sample_value
    assert count("fairlead_router_slo_requests_total", {"class": "chat"}) == 1
    assert count("fairlead_router_slo_good_requests_total", {"class": "chat"}) == good
    for bound in ("ttft", "itl"):
        assert count("fairlead_router_slo_missed_requests_total", {"class": "chat", "bound": bound}) == (bound in missed)
        assert count("fairlead_router_slo_missed_requests_total", {"class": "batch", "bound": bound}) is None, "batch has no bounds"
