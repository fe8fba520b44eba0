"""What one request makes the API process do: its waiting outputs are bounded, and other requests get their turns."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from fairlead_common.fair_slots import FairSlots
from fairlead_common.telemetry.spans import NO_SPAN
from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.engine.generation import LEAST_WAITING_TOKENS, MAX_UNREAD_BYTES, MAX_WAITING_TOKENS, ClientTooSlow, Generation
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.generation.run import MAX_ENTRIES, OUTPUT_ENTRIES, GenerationRun
from fairlead_worker.api.http import LARGE_BODY, RequestContext, to_api_error
from fairlead_worker.api.request_cpu import RequestCpu, UnreportedCpu
from fairlead_worker.ipc.messages import Abort, FromEngine, Output, Ready, Sampling, Step, Submit, ToEngine, TokenLogprobs

ONE = Submit("", bytes([1, 0, 0, 0]), Sampling(max_tokens=1_000_000), 0)
"""A prompt of one token."""


class Engine:
    """The other end of the channel, which records messages."""

    def __init__(self) -> None:
        self.heard: list[ToEngine] = []

    def send(self, message: ToEngine) -> None:
        self.heard.append(message)

    async def receive(self) -> FromEngine:
        raise AssertionError("the test never receives")

    def close(self) -> None: ...


async def test_a_request_says_when_it_was_asked_for() -> None:
    """The engine may be in the middle of a step, and the rest of that step is part of the wait."""
    engine, before = Engine(), time.monotonic()
    client = EngineClient(engine)
    client._handle(Ready(max_model_len=4096, page_size=16, pages=10, model_digest="m", vocabulary_size=100))
    async with Generation(client, [ONE]):
        (submit,) = engine.heard
        assert isinstance(submit, Submit) and before <= submit.received_at <= time.monotonic()


async def test_what_waits_for_a_client_is_bounded() -> None:
    engine = Engine()
    client = EngineClient(engine)
    client._handle(Ready(max_model_len=4096, page_size=16, pages=10, model_digest="m", vocabulary_size=100))
    one = (TokenLogprobs(-1.0, tuple(range(20)), (-1.0,) * 20),)
    async with Generation(client, [ONE, ONE]) as generation:
        outputs = generation.outputs()
        first, second = (message.id for message in engine.heard if isinstance(message, Submit))
        client._handle(Step(outputs=(Output(first, b"\1\0\0\0", 0),)))
        assert [index for index, _ in await anext(outputs)] == [0]
        sent = 0
        while not any(isinstance(message, Abort) for message in engine.heard):
            client._handle(Step(outputs=(Output(first, b"\1\0\0\0", 0, logprobs=one), Output(second, b"\1\0\0\0", 0))))
            sent += 2
            assert sent * 256 < 2 * MAX_UNREAD_BYTES
        assert {message.id for message in engine.heard if isinstance(message, Abort)} == {first, second}
        kept = len(generation._arrived)
        client._handle(Step(outputs=(Output(first, b"\1\0\0\0", 0),)))
        assert len(generation._arrived) == kept, "nothing more is kept"
        with pytest.raises(ClientTooSlow) as slow:
            await anext(outputs)
    assert to_api_error(slow.value).code == "client_too_slow"


async def test_a_list_of_short_prompts_enters_in_parts() -> None:
    """Each sequence costs a step and messages, however short its prompt is."""
    engine = Engine()
    client = EngineClient(engine)
    client._handle(Ready(max_model_len=4096, page_size=16, pages=10, model_digest="m", vocabulary_size=100))
    some = MAX_WAITING_TOKENS // LEAST_WAITING_TOKENS
    async with Generation(client, [Submit("", bytes([1, 0, 0, 0]), ONE.sampling, 0) for _ in range(2 * some)]):
        assert len(engine.heard) == some and client.unsent == some
        (first,) = (message.id for message in engine.heard[:1] if isinstance(message, Submit))
        client._handle(Step(outputs=(Output(first, b"\1\0\0\0", 0),)))
        assert len(engine.heard) == some + 1 and client.unsent == some - 1


async def test_what_was_computed_for_sequences_whose_client_left_is_reported() -> None:
    """One has ended and its last output was not read, one ends before the engine knows, one is aborted."""
    engine, told = Engine(), list[tuple[int, int]]()
    client = EngineClient(engine)
    client._handle(Ready(max_model_len=4096, page_size=16, pages=10, model_digest="m", vocabulary_size=100))
    async with Generation(client, [ONE] * 3, report=lambda index, output: told.append((index, output.computed_tokens))):
        first, second, third = (message.id for message in engine.heard if isinstance(message, Submit))
        client._handle(Step(outputs=(Output(first, b"\1\0\0\0", 0, "stop", computed_tokens=7),)))
    assert told == [(0, 7)]
    client._handle(Step(outputs=(Output(second, b"\1\0\0\0", 0, "length", computed_tokens=6), Output(third, b"\1\0\0\0", 0))))
    assert told == [(0, 7), (1, 6)], "the third has not ended in the engine"
    client._handle(Step(outputs=(Output(third, b"", 0, "abort", computed_tokens=5),)))
    assert told == [(0, 7), (1, 6), (2, 5)] and not client._receivers


async def test_masks_of_a_grammar_are_counted() -> None:
    class Arrived:
        async def outputs(self) -> Any:
            yield [(0, Output("r0", b"\1\0\0\0", 0, mask_seconds=1.0))]

    cpu = RequestCpu("anna", UnreportedCpu())
    choice = SimpleNamespace(finish_reason=None, output_tokens=100, process=lambda output: OutputDelta())
    worker = SimpleNamespace(metrics=MetricsOfNobody(), engine=SimpleNamespace(state=SimpleNamespace(stall_seconds=0.0)))
    run = GenerationRun(cast(Any, worker), cast(Any, SimpleNamespace(choices=[choice])), NO_SPAN, cpu)
    assert [deltas async for deltas in run.deltas(cast(Any, Arrived()))]
    assert [value for _, value in cpu.report()] == [b"980"], "0.2 ms for each token are usual"


async def test_masks_are_counted_of_a_choice_that_a_stop_string_ends() -> None:
    class Arrived:
        def abort(self, index: int, report: Any) -> None:
            report(Output("r0", b"", 0, "abort", computed_tokens=30_000, mask_seconds=1.0))

        async def outputs(self) -> Any:
            yield [(0, Output("r0", b"\1\0\0\0", 0))]

    def process(output: Output) -> OutputDelta:
        choice.finish_reason = "stop"
        return OutputDelta()

    cpu = RequestCpu("anna", UnreportedCpu())
    choice = SimpleNamespace(finish_reason=None, output_tokens=100, process=process, timing=None)
    request = SimpleNamespace(choices=[choice], prompts=[[1]], options=SimpleNamespace(best_of=1))
    worker = MagicMock()
    worker.engine.state.stall_seconds = 0.0
    run = GenerationRun(worker, cast(Any, request), NO_SPAN, cpu)
    assert [deltas async for deltas in run.deltas(cast(Any, Arrived()))]
    assert [value for _, value in cpu.report()] == [b"980"], "the prompt's tokens pay for no mask"


async def test_other_requests_get_their_turn_among_the_outputs_of_many_choices() -> None:
    """An engine may make tokens faster than this process reads them."""
    some = MAX_ENTRIES // OUTPUT_ENTRIES + 1
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    class Arrived:
        async def outputs(self) -> Any:
            yield [(0, Output("r0", b"\1\0\0\0", 0)) for _ in range(5 * some)]

    choice = SimpleNamespace(finish_reason=None, process=lambda output: OutputDelta())
    worker = SimpleNamespace(metrics=MetricsOfNobody(), engine=SimpleNamespace(state=SimpleNamespace(stall_seconds=0.0)))
    run = GenerationRun(cast(Any, worker), cast(Any, SimpleNamespace(choices=[choice])), NO_SPAN, RequestCpu("", None))
    task = asyncio.create_task(other())
    parts = [len(deltas) async for deltas in run.deltas(cast(Any, Arrived()))]
    task.cancel()
    assert parts == [some] * 5 and turns >= 4


class MetricsOfNobody:
    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(observe=lambda seconds: None)


async def test_large_bodies_wait_for_their_turn_and_others_do_not() -> None:
    turns = FairSlots(1)
    slot = await turns.acquire("other")

    def read(size: int) -> "asyncio.Task[bytes]":
        async def receive() -> Any:
            return {"type": "http.request", "body": bytes(size)}

        async def send(message: Any) -> None: ...

        context = RequestContext({"path": "/v1/completions", "headers": []}, receive, send, "pod-0", None, turns)
        return asyncio.create_task(context.read_body(2 * LARGE_BODY))

    small, large = read(LARGE_BODY - 1), read(LARGE_BODY)
    assert len(await small) == LARGE_BODY - 1 and not large.done()
    turns.release("other", slot)
    assert len(await large) == LARGE_BODY
