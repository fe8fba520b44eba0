"""The real process: its start, its drain, its exit codes."""

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from tests.router.harness import Fleet, eventually
from tests.router.stand_in_worker import Exchange

from fairlead_router.main import main


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, list[str]]]:
    """Yield the process, its URL, and the lines it has written."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", "0", *flags, stdout=asyncio.subprocess.PIPE
    )
    lines: list[str] = []
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            while not (found := re.search(r"running on (https?://\S+)", lines[-1] if lines else "")):
                line = await process.stdout.readline()
                assert line, lines
                lines.append(line.decode())
        rest = asyncio.create_task(_collect(process.stdout, lines))
        yield process, found[1], lines
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    await rest


async def _collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode())


async def until_ready(client: httpx.AsyncClient, status: int) -> None:
    async def holds() -> bool:
        return (await client.get("/ready")).status_code == status

    await eventually(holds, f"/ready answers {status}", 20)


async def test_sigterm_finishes_streams_accepts_late_connections_and_exits_0(fleet: Fleet) -> None:
    gate = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        await gate.wait()
        await exchange.event("two")
        await exchange.end()

    worker = await fleet.worker(behaviour=waits)
    flags = ["--workers", f"static://{worker.address}", "--poll-interval", "0.1", "--drain-timeout", "20", "--drain-grace", "1"]
    async with router_process(*flags) as (process, url, lines), httpx.AsyncClient(base_url=url, timeout=30) as client:
        await until_ready(client, 200)
        secret = "the prompt that no log may show"
        request = {"prompt": secret, "stream": True}
        async with client.stream("POST", "/v1/completions", json=request, headers={"authorization": "Bearer k"}) as stream:
            body = stream.aiter_bytes()
            assert b"one" in await anext(body)
            process.send_signal(signal.SIGTERM)
            await until_ready(client, 503)
            late = asyncio.create_task(client.post("/v1/completions", json=request))  # endpoints lag behind readiness
            await eventually(lambda: len(worker.received) == 2, "the late request reached the worker")
            gate.set()
            assert b"".join([piece async for piece in body]).endswith(b"data: [DONE]\n\n")
        assert (await late).status_code == 200 and (await late).headers["connection"] == "close"
        async with asyncio.timeout(15):
            assert await process.wait() == 0
    written = "".join(lines)
    assert secret not in written and "Bearer" not in written and "POST /v1/completions 200" in written


async def test_a_stream_that_outlives_the_drain_is_cut_and_the_process_still_ends(fleet: Fleet) -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.head()
        await exchange.event("one")
        await exchange.until_client_gone()

    worker = await fleet.worker(behaviour=endless)
    flags = ["--workers", f"static://{worker.address}", "--poll-interval", "0.1", "--drain-timeout", "1", "--drain-grace", "0"]
    async with router_process(*flags) as (process, url, _), httpx.AsyncClient(base_url=url, timeout=30) as client:
        await until_ready(client, 200)
        async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as stream:
            lines = stream.aiter_lines()
            assert "one" in await anext(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line async for line in lines if line]
            assert json.loads(rest[-1].removeprefix("data: "))["error"]
        async with asyncio.timeout(15):
            assert await process.wait() == 0


def refused(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Run the entry point, which must end with status 2."""
    monkeypatch.setattr(sys, "argv", ["fairlead-router", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2


def test_a_wrong_or_missing_flag_is_named_without_the_others(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    refused(monkeypatch, "--workers", "http://a")
    said = capsys.readouterr().err
    assert "--workers" in said and "http://a" in said
    refused(monkeypatch, "--polcy=Random")
    assert capsys.readouterr().err == "fairlead-router: unrecognized arguments: --polcy=Random; fairlead-router --help lists the flags\n"
    refused(monkeypatch, "--redis-url", "redis://:secret@host:6379/0")
    said = capsys.readouterr().err
    assert "--workers is missing" in said and "FAIRLEAD_WORKERS" in said and "secret" not in said


@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--picker-port"])
async def test_a_port_in_use_is_named_with_its_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--workers", "static://127.0.0.1:9", "--host", "127.0.0.1", "--port", "0", flag, port]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fairlead_router.main", *flags, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 1 and f"{flag} {port}".encode() in said, said
    assert b"Traceback" not in said
