"""The fast path of each token is cheap and has the same result as the plain path."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from tests.worker.api.process import WorkerProcess

from fairlead_common.fair_slots import FairSlots
from fairlead_worker.api.answers.completions import Completion, CompletionChoice, PromptTokensDetails, Usage
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.prepare import CachedTokens
from fairlead_worker.api.generation.sampling import read_options
from fairlead_worker.api.openai.streaming import ChunkWriter
from fairlead_worker.api.replies import _send_document
from fairlead_worker.api.request_cpu import RequestCpu
from fairlead_worker.api.schema import CompletionRequest, StreamOptions
from fairlead_worker.ipc.messages import Loading
from fairlead_worker.ipc.transport import MESSAGE_BYTES, YIELD_AFTER, ZmqChannel, ZmqEngineEnd

USAGE = Usage(prompt_tokens=1, completion_tokens=1, total_tokens=2, prompt_tokens_details=PromptTokensDetails(0))
WORKER = SimpleNamespace(system_fingerprint=None)


class Answered:
    """A generation request with two choices."""

    choices = (None, None)

    options = read_options(CompletionRequest(), {})

    def usage(self) -> Usage:
        return USAGE

    def awaits_prompt_logprobs(self, index: int) -> bool:
        return False


class TextFormatter:
    id = 'cmpl-"1"'
    chunk_type = whole_type = Completion

    def first_chunk(self, index: int) -> CompletionChoice | None:
        return None

    def chunks(self, index: int, piece: OutputDelta) -> list[CompletionChoice]:
        return [CompletionChoice(index, piece.text)]

    def last_chunk(self, index: int, choice: Choice) -> CompletionChoice:
        return CompletionChoice(index, "", finish_reason="stop")

    def full_choice(self, index: int, choice: Choice, piece: OutputDelta) -> CompletionChoice:
        raise AssertionError("this is a stream")

    def extra_fields(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("continuous_usage", [False, True])
def test_a_chunk_of_text_is_the_document_it_stands_for(include_usage: bool, continuous_usage: bool) -> None:
    texts = [" a", '"quoted"\\', "naïve 🧭", "\x00text\x00", "\n\n", "data: [DONE]"]
    options = StreamOptions(include_usage=include_usage or continuous_usage, continuous_usage_stats=continuous_usage)
    writer = ChunkWriter(WORKER, CompletionRequest(stream_options=options), "m", TextFormatter(), Answered())  # type: ignore[arg-type]  # stubs
    written = writer.begin() + b"".join(writer.add([(place % 2, OutputDelta(text))]) for place, text in enumerate(texts))
    events = [event.removeprefix("data: ") for event in written.decode().split("\n\n")[: len(texts)]]
    for place, (event, text) in enumerate(zip(events, texts, strict=True)):
        choices = TextFormatter().chunks(place % 2, OutputDelta(text))
        document = Completion(
            id=TextFormatter.id, created=json.loads(event)["created"], model="m", system_fingerprint=None, choices=choices
        )
        if continuous_usage:
            document.usage = USAGE
        elif include_usage:
            document.usage = None
        assert event.encode() == msgspec.json.encode(document)


async def test_a_fast_engine_leaves_the_event_loop_its_turns() -> None:
    channel = ZmqChannel()
    end = ZmqEngineEnd(channel.address)
    messages, turns = 1000, 0
    for percent in range(messages):
        end.send(Loading(phase="download", percent=percent))

    async def beside() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(beside())
    async with asyncio.timeout(30):
        for percent in range(messages):
            assert (await channel.receive()).percent == percent  # type: ignore[union-attr]  # only Loading messages were sent
    other.cancel()
    end.close()
    channel.close()
    assert turns >= messages // YIELD_AFTER - 1


class AlwaysReadable:
    """A socket that has the same message again and again."""

    def __init__(self, message: Loading) -> None:
        self._data = msgspec.msgpack.encode(message)

    def get(self, option: int) -> int:
        return int(zmq.POLLIN)

    def recv(self, flags: int) -> bytes:
        return self._data


async def test_long_messages_leave_the_event_loop_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen messages with log-probabilities in a row would stop it for 0.17 s."""
    channel, turns = ZmqChannel(), 0

    async def other_work() -> None: ...

    try:
        monkeypatch.setattr(channel, "_in", AlwaysReadable(Loading(phase="x" * YIELD_AFTER * MESSAGE_BYTES, percent=0)))
        for _ in range(4):
            other = asyncio.create_task(other_work())
            await channel.receive()
            turns += other.done()
            await other
    finally:
        monkeypatch.undo()
        channel.close()
    assert turns == 3, "all but the first"


async def test_a_cancelled_receive_loses_nothing() -> None:
    channel = ZmqChannel()
    end = ZmqEngineEnd(channel.address)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.receive(), 0.05)
    end.send(Loading(phase="weights", percent=7))
    assert await asyncio.wait_for(channel.receive(), 30) == Loading(phase="weights", percent=7)
    end.close()
    channel.close()


def test_idle_threads_sleep_unless_the_environment_says_otherwise(shared: WorkerProcess, flagged: WorkerProcess) -> None:
    for worker, expected in ((shared, os.environ.get("OMP_WAIT_POLICY", "PASSIVE")), (flagged, "ACTIVE")):
        environment = Path(f"/proc/{worker.engine_pid}/environ").read_bytes().split(b"\0")
        assert f"OMP_WAIT_POLICY={expected}" in [os.fsdecode(entry) for entry in environment]


@pytest.mark.parametrize(("needs_prompt_logprobs", "logprobs"), [(True, None), (False, 20), (False, None)])
def test_log_probabilities_are_shaped_beside_the_event_loop(needs_prompt_logprobs: bool, logprobs: int | None) -> None:
    shaped_in: list[int] = []
    asyncio.run(shape_answers(1, lambda: shaped_in.append(threading.get_ident()), needs_prompt_logprobs, logprobs))
    assert [thread != threading.get_ident() for thread in shaped_in] == [needs_prompt_logprobs or logprobs is not None]


def test_answers_with_log_probabilities_are_shaped_one_at_a_time() -> None:
    """The event loop waits for the interpreter's lock behind each thread that computes."""
    meeting = threading.Barrier(2)

    def shape() -> None:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.1)
            raise AssertionError("two threads shape answers")

    asyncio.run(shape_answers(4, shape, needs_prompt_logprobs=True))


async def shape_answers(count: int, shaped: Callable[[], None], needs_prompt_logprobs: bool, logprobs: int | None = None) -> None:
    """Send so many answers of one choice at once. `shaped` is called for each choice."""
    prepared = SimpleNamespace(
        options=read_options(CompletionRequest(), {}),
        choices=(None,),
        needs_prompt_logprobs=needs_prompt_logprobs,
        has_logprobs=needs_prompt_logprobs or bool(logprobs),
        submits=(SimpleNamespace(tenant=""),),
        select_best=lambda: [0],
        usage=lambda: USAGE,
        count_cached=lambda: CachedTokens(0, 0, 0),
    )
    shape = SimpleNamespace(
        id="id",
        whole_type=Completion,
        extra_fields=dict,
        full_choice=lambda place, choice, piece: shaped() or CompletionChoice(place, piece.text),  # type: ignore[func-returns-value]
    )

    async def pieces() -> AsyncIterator[list[tuple[int, OutputDelta]]]:
        yield [(0, OutputDelta("a", is_last=True))]

    class Answer:
        cpu = RequestCpu("", None)

        async def respond(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            assert status == 200 and json.loads(data)["choices"][0]["text"] == "a"

    def send() -> Coroutine[Any, Any, None]:
        writer = ChunkWriter(worker, CompletionRequest(), "m", shape, prepared)  # type: ignore[arg-type]
        return _send_document(Answer(), worker, prepared, writer, pieces())  # type: ignore[arg-type]

    worker = SimpleNamespace(large_answers=FairSlots(1), system_fingerprint=None)
    await asyncio.gather(*(send() for _ in range(count)))
