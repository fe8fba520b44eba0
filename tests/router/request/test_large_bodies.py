"""Bodies that are expensive to read: in other processes, fairly between tenants, bounded, and paid for."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.common.test_json_size import BOMBS
from tests.router.harness import Fleet, RunningRouter, eventually
from tests.router.prompt_format import make_format
from tests.router.tenancy.test_access import ANNA, BORIS, ask, bearer, guarded
from tests.router.tenancy.test_quota import level

from fairlead_common.json_size import check_json
from fairlead_common.memory import LARGE
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, RESPONSES
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.errors import ApiError
from fairlead_router.request import body as body_module
from fairlead_router.request import parser_pool, prompts, validation
from fairlead_router.request.prompts import INLINE_BYTES, THREAD_OBJECTS, Prompt, Prompts

LONG, SHORT = "界" * (LARGE // 3 + 100), "short " * (INLINE_BYTES // 3)
RICH = {"anna": {"tokensPerMinute": 60, "burstTokens": 10_000_000}, "boris": {}}
"""One token per second: the bucket does not refill within a test."""


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the bodies that this process, the event loop's, decodes."""
    sizes = list[int]()
    read, check = body_module.read_fields, validation.check

    def read_fields(path: str, raw: bytes, *rest: Any) -> Any:
        sizes.append(len(raw))
        return read(path, raw, *rest)

    def check_fields(path: str, raw: bytes) -> None:
        sizes.append(len(raw))
        check(path, raw)

    monkeypatch.setattr(prompts, "read_fields", read_fields)
    monkeypatch.setattr(validation, "check", check_fields)
    return sizes


def pids(router: RunningRouter) -> list[int]:
    return router.server.router.prompts._pool.pids


async def post(router: RunningRouter, path: str, content: bytes, key: str = ANNA) -> httpx.Response:
    return await router.client.post(path, content=content, headers=bearer(key) | {"content-type": "application/json"})


HEAVY = {
    "text": {"prompt": LONG},
    "lists": {"prompt": "x", "messages": [[]] * (THREAD_OBJECTS + 1)},
    "objects": {"prompt": "x", "metadata": [{}] * (THREAD_OBJECTS + 1)},
    "keys": {"prompt": "x", **{f"key {number}": 0 for number in range(THREAD_OBJECTS + 1)}},
    "token ids": {"prompt": [65] * LARGE},
}


@pytest.mark.parametrize("kind", HEAVY)
async def test_an_expensive_body_is_read_in_another_process_with_the_same_result(
    fleet: Fleet, tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = list[Prompt]()
    read = Prompts.read

    async def watched(*arguments: Any) -> Prompt:
        made.append(await read(*arguments))
        return made[-1]

    monkeypatch.setattr(Prompts, "read", watched)
    router, worker = await guarded(fleet, tmp_path)
    raw = json.dumps(HEAVY[kind]).encode()
    assert (await post(router, COMPLETIONS, raw)).status_code == 200
    assert not [size for size in decoded if size == len(raw)]
    (request,), (prompt,), format = worker.received, made, make_format()
    anna = router.server.router.handler.keys.authenticate(ANNA.encode())
    expected = router.server.router.prompts._read(COMPLETIONS, raw, anna, "", check_json(raw, 1 << 20))
    assert prompt.price > 0, "its CPU time"
    assert msgspec.structs.replace(prompt, price=0.0) == msgspec.structs.replace(expected, price=0.0) and prompt.tokens
    assert list(prompt.hashes) == list(block_hashes(prompt_root(format, "", prompt.salt), prompt.tokens, format.block_tokens))
    assert request.json == HEAVY[kind], "the worker gets the client's own body"


async def test_ordinary_bodies_start_no_process(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    code = "".join(f'{{"a": [{number}, "b:c"]}}\n' for number in range(THREAD_OBJECTS))  # brackets and colons in a string cost nothing
    for prompt in ("hello", SHORT, "word " * 20_000, code):
        assert (await ask(router, ANNA, prompt)).status_code == 200
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}] * 300
    assert (await router.client.post(CHAT, json={"messages": messages}, headers=bearer(ANNA))).status_code == 200
    assert not pids(router)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, MESSAGES, RESPONSES, EMBEDDINGS, "/tokenize", "/detokenize", COUNT_TOKENS])
async def test_a_body_with_too_many_nodes_is_refused_and_paid_for(fleet: Fleet, tmp_path: Path, decoded: list[int], path: str) -> None:
    router, worker = await guarded(fleet, tmp_path, RICH)
    assert (await ask(router, ANNA)).status_code == 200
    worker.received.clear()
    bombs = BOMBS if path == COMPLETIONS else {"lists": BOMBS["lists"]}
    for kind, bomb in bombs.items():
        before = level(router)
        refused = await post(router, path, bomb)
        assert refused.status_code == 400, (kind, refused.text)
        error = refused.json()["error"]
        assert "at most" in error["message"] or "more than" in error["message"], kind
        assert before - level(router) > len(bomb) / 10_000, kind
    large = {len(bomb) for bomb in bombs.values() if len(bomb) > LARGE}
    assert not large & set(decoded) and not worker.received


async def test_a_body_with_too_many_nodes_is_refused_without_a_worker(fleet: Fleet, tmp_path: Path, decoded: list[int]) -> None:
    router = await fleet.router(ready_without_workers=True, workers="static://127.0.0.1:9", ready=0)
    refused = await router.client.post(COMPLETIONS, content=BOMBS["lists"])
    assert refused.status_code == 400 and "65536" in refused.json()["error"]["message"] and not decoded
    missing = await router.client.post(COMPLETIONS, json={"user": LONG})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "prompt" and not decoded


async def test_a_tenants_large_bodies_delay_only_its_own(fleet: Fleet, tmp_path: Path) -> None:
    """Anna's process is stopped while it reads, as if her text took for ever."""
    router, worker = await guarded(fleet, tmp_path)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (hers,) = pids(router)
    slots = router.server.router.prompts._pool._slots
    os.kill(hers, signal.SIGSTOP)
    try:
        asking = [asyncio.create_task(ask(router, ANNA, f"{number}{LONG}")) for number in range(4)]
        await eventually(lambda: len(slots._waiting.get("anna", ())) == 3, "one is read, three wait")
        for prompt in (LONG, SHORT, f"2{LONG}"):
            assert (await asyncio.wait_for(ask(router, BORIS, prompt), 30)).status_code == 200
        assert (await asyncio.wait_for(ask(router, ANNA, SHORT), 30)).status_code == 200
        assert len(worker.received) == 5 and len(pids(router)) == 2
        asking[0].cancel()  # its client disconnects
        await eventually(lambda: len(router.server._running_tasks()) == 3, "its request has ended")
        assert len(slots._waiting["anna"]) == 3, "its body is still being read"
    finally:
        os.kill(hers, signal.SIGCONT)
    assert {answer.status_code for answer in await asyncio.gather(*asking[1:])} == {200}


async def test_a_body_that_takes_too_much_memory_is_refused_alone(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, RICH)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (first,), before = pids(router), level(router)
    hungry = asyncio.create_task(ask(router, ANNA, "! ?" * 1_900_000))  # 150 bytes for each of 5.7 million tokens
    assert (await ask(router, BORIS, SHORT)).status_code == 200
    refused = await hungry
    assert refused.status_code == 413 and refused.json()["error"]["code"] == "request_too_large"
    assert before - level(router) > 10_000, "it has paid for the CPU time of the process"
    assert first not in pids(router) and len(worker.received) == 2
    assert (await ask(router, ANNA, LONG)).status_code == 200 and pids(router) != [first]


async def test_a_tenants_dense_bodies_hold_one_thread(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    router, _ = await guarded(fleet, tmp_path)
    reading, go, read = list[str](), threading.Event(), Prompts._read

    def slow(self: Prompts, path: str, raw: bytes, caller: Any, *rest: Any) -> Prompt:
        reading.append(raw.decode()[:60])
        if b"hers" in raw:
            go.wait()
        return read(self, path, raw, caller, *rest)

    monkeypatch.setattr(Prompts, "_read", slow)
    asking = [asyncio.create_task(ask(router, ANNA, f"hers {number}" + "! ?" * 20_000)) for number in range(8)]
    try:
        await eventually(lambda: len(reading) == 1, "one of hers is read")
        assert (await asyncio.wait_for(ask(router, BORIS, SHORT), 30)).status_code == 200
        assert (await asyncio.wait_for(ask(router, BORIS, "his " * 10_000), 30)).status_code == 200
        assert len(reading) == 3
    finally:
        go.set()
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_an_idle_process_that_the_system_ended_is_replaced(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (first,) = pids(router)
    os.kill(first, signal.SIGKILL)
    await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert (await ask(router, BORIS, LONG)).status_code == 200, "it is not his fault"
    assert first not in pids(router)


async def test_a_body_that_is_refused_without_a_worker_is_paid_for(fleet: Fleet, tmp_path: Path) -> None:
    router, worker = await guarded(fleet, tmp_path, RICH)
    assert (await ask(router, ANNA)).status_code == 200
    worker.ready = False
    await eventually(lambda: not router.server.router.table.any_usable(), "no worker is left")
    for fields in ({"prompt": "x", "user": 5}, {"prompt": "x", "user": 5, "padding": "x" * 10_000}, {"user": LONG}):
        before = level(router)
        assert (await post(router, COMPLETIONS, json.dumps(fields).encode())).status_code == 400
        assert level(router) < before, "a refused body is paid"


async def test_a_process_that_was_killed_is_replaced(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (first,) = pids(router)
    os.kill(first, signal.SIGSTOP)
    asking = asyncio.create_task(ask(router, ANNA, LONG))
    await eventually(lambda: "anna" in router.server.router.prompts._pool._slots._holders, "it is asked")
    os.kill(first, signal.SIGXCPU)  # what the limit of CPU time sends
    os.kill(first, signal.SIGCONT)
    assert (await asking).status_code == 413
    assert (await ask(router, ANNA, LONG)).status_code == 200
    assert pids(router) != [first]


async def test_a_process_that_answers_too_late_is_replaced(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer would be taken for that of the next body."""
    router, _ = await guarded(fleet, tmp_path)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (first,) = pids(router)
    ask_process = parser_pool.ParserProcess._ask

    def ask_without_time(process: parser_pool.ParserProcess, *arguments: Any) -> Any:
        monkeypatch.setattr(parser_pool.ParserProcess, "_ask", ask_process)
        with pytest.MonkeyPatch.context() as only_now:
            only_now.setattr(parser_pool, "ANSWER_SECONDS", 0)
            return ask_process(process, *arguments)

    monkeypatch.setattr(parser_pool.ParserProcess, "_ask", ask_without_time)
    assert (await ask(router, ANNA, LONG)).status_code == 413
    for _ in range(2):
        assert (await ask(router, ANNA, LONG)).status_code == 200
    assert first not in pids(router)


async def test_a_dense_text_is_refused_after_twice_the_allowed_tokens(fleet: Fleet) -> None:
    format = msgspec.structs.replace(make_format(), max_model_len=1000)
    worker = await fleet.worker(format=format)
    router = await fleet.router(worker)
    cache = router.server.router.formats.cache
    refused = await router.complete("! ?" * 1_000_000)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert cache.missed_tokens == 0 and not worker.received


async def test_a_refused_body_is_freed_without_a_garbage_collection(fleet: Fleet, tmp_path: Path) -> None:
    """A router collects garbage rarely, and an exception that refers to itself would keep its request's body until then."""
    router, _ = await guarded(fleet, tmp_path)
    reader, paid = router.server.router.prompts, list[float]()
    gc.disable()
    try:
        for body in (BOMBS["lists"], BOMBS["deep lists"]):
            for read in (lambda body=body: reader.read(COMPLETIONS, body), lambda body=body: reader.check_size(body, paid.append)):
                with contextlib.suppress(ApiError):
                    try:
                        await read()
                    except ApiError as error:
                        refusal = weakref.ref(error)
                        raise
                await eventually(lambda refusal=refusal: refusal() is None, "nothing refers to the exception", seconds=5)
    finally:
        gc.enable()


async def test_the_processes_end_with_the_router(fleet: Fleet, tmp_path: Path) -> None:
    router, _ = await guarded(fleet, tmp_path)
    assert (await ask(router, ANNA, LONG)).status_code == 200
    (pid,) = pids(router)
    router.server.router.prompts.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
