"""Streams of Responses and Messages, as the real clients read them, equal the whole response for every split of the text."""

from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import httpx2
import msgspec
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_common.protocols.messages import MessagesBody
from fairlead_common.protocols.responses import ResponsesBody
from fairlead_worker.api.answers.completions import PromptTokensDetails, Usage
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.generation.choice import OutputDelta
from fairlead_worker.api.protocols.anthropic_messages import MessagesWriter
from fairlead_worker.api.protocols.openai_responses import ResponsesWriter
from fairlead_worker.ipc.messages import Sampling, TokenLogprobs
from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text, gather

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


class Chosen:
    """A choice that has ended."""

    stop_reason = None
    reasoning_tokens = 2

    def __init__(self, reason: str) -> None:
        self.client_finish_reason = reason


class Submitted:
    sampling = Sampling(max_tokens=9, temperature=1.0)


class Answered:
    """A generation request that has ended."""

    needs_prompt_logprobs = False
    submits = (Submitted(),)
    attempt = ""

    def __init__(self, reason: str) -> None:
        self.choices = (Chosen(reason),)

    def usage(self) -> Usage:
        return Usage(prompt_tokens=7, completion_tokens=5, total_tokens=12, prompt_tokens_details=PromptTokensDetails(4))


class Encoder:
    """Names tokens."""

    token_texts = SimpleNamespace(special_name=lambda token: f"<{token}>", bytes_of=lambda token, text: f"<{token}>".encode())


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[list[Event]], str]:
    """Events in pieces and a finish reason: reasoning, text and calls in any order."""
    events: list[Event] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(("text", "reasoning", "call")), max_size=5)):
        if kind == "call":
            events.append(CallStart(calls, f"call_{calls}", draw(st.sampled_from(("f", "g")))))
            events += [
                CallArguments(calls, text) for text in draw(st.sampled_from(([], ["{}"], ['{"a": ', '[1, "é"]', "}"], ['{"a"', ": 1}"])))
            ]
            calls += 1
        else:
            events += [(Text if kind == "text" else Reasoning)(text) for text in draw(st.lists(TEXTS, min_size=1, max_size=3))]
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    pieces = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
    return pieces, draw(st.sampled_from(("length", "tool_calls" if calls else "stop")))


def writers(reason: str) -> tuple[ResponsesWriter, MessagesWriter]:
    prepared: Any = Answered(reason)
    encoder: Any = Encoder()
    return ResponsesWriter("r", "m", ResponsesBody(), prepared, encoder, {}), MessagesWriter("r", "m", MessagesBody(), prepared)


def run(writer: Any, pieces: list[list[Event]], *, stream: bool) -> Any:
    batches = [[(0, OutputDelta("", [at], [TokenLogprobs(-0.5)], [""], parsed_events=events))] for at, events in enumerate(pieces)]
    if stream:
        return writer.begin() + b"".join(map(writer.add, batches)) + writer.end(b": usage 7 5\n\n")
    for batch in batches:
        writer.collect(batch)
    return msgspec.to_builtins(writer.document())


def parsed_response(data: bytes) -> list[Any]:
    """Return the events as OpenAI's client parses them."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=data, headers={"content-type": "text/event-stream"}))
    http_client = httpx.Client(transport=transport)
    client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=http_client, _strict_response_validation=True)
    with client, client.responses.stream(model="m", input="x") as stream:
        return list(stream)


@settings(max_examples=30, deadline=None)
@given(answers())
def test_a_response(answer: tuple[list[list[Event]], str]) -> None:
    pieces, reason = answer
    whole, events = run(writers(reason)[0], pieces, stream=False), parsed_response(run(writers(reason)[0], pieces, stream=True))
    last = events[-1]
    assert last.type == f"response.{whole['status']}" and whole["status"] == ("incomplete" if reason == "length" else "completed")
    assert [item.id for item in last.response.output] == [item["id"] for item in whole["output"]]
    message = gather([event for piece in pieces for event in piece])
    assert (
        last.response.output_text == message.text == "".join(event.delta for event in events if event.type == "response.output_text.delta")
    )
    thoughts = [part["text"] for item in whole["output"] if item["type"] == "reasoning" for part in item["content"]]
    assert "".join(thoughts) == message.reasoning
    calls = [item for item in whole["output"] if item["type"] == "function_call"]
    assert [(call["call_id"], call["name"], call["arguments"]) for call in calls] == [(c.id, c.name, c.arguments) for c in message.calls]
    said = [event.item.model_dump(exclude_unset=True) for event in events if event.type == "response.output_item.done"]
    assert said == whole["output"] and len({item["id"] for item in said}) == len(said)
    assert all(item["status"] == "completed" for item in said[:-1]) and said[-1]["status"] == whole["status"]


def parsed_message(data: bytes) -> Any:
    """Return the message as Anthropic's client parses it."""
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, content=data, headers={"content-type": "text/event-stream"}))
    client = anthropic.Anthropic(api_key="x", base_url="http://x", http_client=httpx2.Client(transport=transport))
    with client, client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
        return stream.get_final_message()


@settings(max_examples=30, deadline=None)
@given(answers())
def test_a_message(answer: tuple[list[list[Event]], str]) -> None:
    pieces, reason = answer
    whole, message = run(writers(reason)[1], pieces, stream=False), parsed_message(run(writers(reason)[1], pieces, stream=True))
    fields = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("id", "name", "input")}
    blocks = [{"type": block.type, **{name: getattr(block, name) for name in fields[block.type]}} for block in message.content]
    assert blocks == whole["content"]
    assert (message.stop_reason, message.stop_sequence) == (whole["stop_reason"], None)
    assert message.usage.model_dump(exclude_unset=True) == whole["usage"]
    assert whole["usage"]["input_tokens"] == 3 and whole["usage"]["cache_read_input_tokens"] == 4


def test_hidden_thinking_leaves_an_empty_block() -> None:
    body: Any = MessagesBody(thinking={"type": "adaptive", "display": "omitted"})
    prepared: Any = Answered("stop")
    whole = run(MessagesWriter("r", "m", body, prepared), [[Reasoning("hm"), Text("so")]], stream=False)
    assert whole["content"] == [{"type": "thinking", "thinking": "", "signature": ""}, {"type": "text", "text": "so"}]


def test_a_failure_in_mid_stream_has_the_apis_own_form() -> None:
    error = ApiError(500, "the engine could not", type="server_error", code="engine_error")
    responses, messages = writers("stop")
    events = [line for line in (responses.begin() + responses.fail(error)).decode().split("\n\n") if line]
    assert events[-2].startswith('event: error\ndata: {"type":"error","code":"engine_error","message":"the engine could not"')
    assert events[-1].startswith("event: response.failed\n") and '"status":"failed"' in events[-1]
    assert messages.fail(error) == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"the engine could not"}}\n\n'
    )
