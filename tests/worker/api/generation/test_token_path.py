"""The fast path of each token is cheap and has the same result as the plain path."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.api.process import WorkerProcess

from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.sampling import OutputOptions
from fairlead_worker.api.openai.streaming import ChunkWriter, ReplyOptions
from fairlead_worker.api.replies import _send_document
from fairlead_worker.ipc.messages import Loading
from fairlead_worker.ipc.transport import YIELD_AFTER, ZmqChannel, ZmqEngineEnd


class Answered:
    """A generation request with two choices."""

    choices = (None, None)

    output_options = OutputOptions()

    def usage(self) -> dict[str, Any]:
        return {"prompt_tokens_details": {"cached_tokens": 0}}

    def awaits_prompt_logprobs(self, index: int) -> bool:
        return False


class TextFormatter:
    id = 'cmpl-"1"'
    chunk_object = whole_object = "text_completion"

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        return None

    def chunks(self, index: int, piece: OutputDelta) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"content": piece.text}, "logprobs": None}]

    def last_chunk(self, index: int, choice: Choice) -> dict[str, Any]:
        return {"index": index, "finish_reason": "stop"}

    def full_choice(self, index: int, choice: Choice, piece: OutputDelta) -> dict[str, Any]:
        raise AssertionError("this is a stream")


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("continuous_usage", [False, True])
def test_a_chunk_of_text_is_the_document_it_stands_for(include_usage: bool, continuous_usage: bool) -> None:
    texts = [" a", '"quoted"\\', "naïve 🧭", "\x00text\x00", "\n\n", "data: [DONE]"]
    reply = ReplyOptions("m", 1, TextFormatter(), stream=True, include_usage=include_usage, continuous_usage_stats=continuous_usage)
    writer = ChunkWriter(Answered(), reply)  # type: ignore[arg-type]  # a stub of the request
    written = writer.begin() + b"".join(writer.add([(place % 2, OutputDelta(text))]) for place, text in enumerate(texts))
    events = [event.removeprefix("data: ") for event in written.decode().split("\n\n")[: len(texts)]]
    for place, (event, text) in enumerate(zip(events, texts, strict=True)):
        document = reply.envelope("text_completion", reply.formatter.chunks(place % 2, OutputDelta(text)))
        if continuous_usage:
            document["usage"] = Answered().usage()
        elif include_usage:
            document["usage"] = None
        assert json.loads(event) == document
        assert list(json.loads(event)) == list(document)


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


async def test_a_cancelled_receive_loses_nothing() -> None:
    channel = ZmqChannel()
    end = ZmqEngineEnd(channel.address)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(channel.receive(), 0.05)
    end.send(Loading(phase="weights", percent=7))
    assert await asyncio.wait_for(channel.receive(), 30) == Loading(phase="weights", percent=7)
    end.close()
    channel.close()


@pytest.mark.parametrize("given, expected", [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_idle_threads_sleep_unless_the_environment_says_otherwise(
    start: Callable[..., WorkerProcess], monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    worker = start().wait_ready()
    environment = Path(f"/proc/{worker.engine_pid}/environ").read_bytes().split(b"\0")
    assert f"OMP_WAIT_POLICY={expected}" in [os.fsdecode(entry) for entry in environment]


@pytest.mark.parametrize(("needs_prompt_logprobs", "logprobs"), [(True, None), (False, 20), (False, None)])
def test_log_probabilities_are_shaped_beside_the_event_loop(needs_prompt_logprobs: bool, logprobs: int | None) -> None:
    shaped_in: list[int] = []
    prepared = SimpleNamespace(
        output_options=OutputOptions(),
        choices=(None,),
        needs_prompt_logprobs=needs_prompt_logprobs,
        submissions=(SimpleNamespace(sampling=SimpleNamespace(logprobs=logprobs)),),
        select_best=lambda: [0],
        usage=lambda: {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    )
    shape = SimpleNamespace(
        id="id",
        whole_object="whole",
        extra_fields=dict,
        full_choice=lambda place, choice, piece: {"index": shaped_in.append(threading.get_ident())},
    )

    async def pieces() -> AsyncIterator[list[tuple[int, OutputDelta]]]:
        yield [(0, OutputDelta("a", is_last=True))]

    class Answer:
        async def respond_json(self, document: dict[str, Any], headers: dict[str, str]) -> None:
            assert document["choices"] == [{"index": None}]

    asyncio.run(_send_document(Answer(), prepared, ChunkWriter(prepared, ReplyOptions("m", 0, shape, stream=False)), pieces()))  # type: ignore[arg-type]
    assert [thread != threading.get_ident() for thread in shaped_in] == [needs_prompt_logprobs or logprobs is not None]
