"""The content of an answer in one form for whole answers and for streamed events, so that they can be compared."""

import json
from typing import Any

from pydantic_core import from_json

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, MESSAGES, RESPONSES

CLOSE = 1e-4
"""Tolerance of non-integer numbers: the sums of a matrix product depend on the batch."""
FAULTS = ("server_error", "engine_error", "internal_error", "unavailable", "api_error")
KEPT = ("finish_reason", "stop_reason", "logprobs", "token_ids", "prompt_token_ids")
_DRAWN = frozenset(("id", "call_id", "created", "created_at", "completed_at", "item_id", "model"))
_BEGIN, _END = ["response.created", "response.in_progress"], ("response.completed", "response.incomplete")


def from_whole(path: str, answer: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a whole answer, without ids and times that differ for each answer."""
    if path not in (COMPLETIONS, CHAT):
        kept: dict[str, Any] = _plain(answer)
        return kept
    choices = {}
    for choice in answer["choices"]:
        message = choice.get("message", {})
        said = {"text": (message["content"] or "") if message else choice["text"]}
        said |= {"reasoning": message.get("reasoning") or "", "calls": _calls(message.get("tool_calls") or [])}
        choices[choice["index"]] = {name: choice.get(name) for name in KEPT} | said
    return {"choices": choices, "usage": answer["usage"], "beside": answer.get("prompt_token_ids")}


def from_stream(path: str, data: str) -> dict[str, Any]:
    """Return the same of a stream. Raises AssertionError if it is out of order or has no end."""
    events = _events(data)
    readers = {RESPONSES: _response, MESSAGES: _message}
    return readers.get(path, _chunks)(events)


def check_ending(path: str, data: str) -> str:
    """Return what is wrong with a stream's end. Empty: it ends as its kind does, or with an error that is the request's own fault."""
    try:
        events = _events(data)
    except (ValueError, AssertionError) as error:
        return f"a stream of what are no events: {error}"
    last = events[-1] if events else None
    if last == "[DONE]":
        return "" if path in (COMPLETIONS, CHAT) else "a stream of named events that ends with [DONE]"
    kinds = [event.get("type") if isinstance(event, dict) else None for event in events]
    if path == RESPONSES and kinds and kinds[-1] in _END:
        return ""
    if path == MESSAGES and kinds and kinds[-1] == "message_stop":
        return ""
    failed = events[-2] if path == RESPONSES and kinds[-2:] == ["error", "response.failed"] else last
    fault = (failed.get("error") or failed) if isinstance(failed, dict) else {}
    if fault.get("message") and not {fault.get("type"), fault.get("code")} & {*FAULTS}:
        return ""
    return f"a stream that ends with {data[-300:]!r}"


def is_close(one: Any, other: Any) -> bool:
    """Return whether both are equal, non-integer numbers within a tolerance."""
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) < CLOSE
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)


def _events(data: str) -> list[Any]:
    """Return the data of each event. Named events must have the name in their data."""
    events = []
    for block in data.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line and not line.startswith(":"))
        if "data" not in fields:
            continue
        event = fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])
        assert fields.get("event") in (None, event.get("type") if isinstance(event, dict) else ""), f"{fields['event']} is {event}"
        events.append(event)
    return events


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in _DRAWN}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _calls(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _chunks(events: list[Any]) -> dict[str, Any]:
    """Read completions and chats, with `stream_options.include_usage` or without."""
    assert events[-1] == "[DONE]"
    usage = events[-2]["usage"] if not events[-2]["choices"] else None
    choices: dict[int, dict[str, Any]] = {}
    beside = None
    for event in events[: -2 if usage else -1]:
        (chunk,) = event["choices"]
        beside = beside or event.get("prompt_token_ids")
        if chunk["index"] not in choices:
            choices[chunk["index"]] = dict.fromkeys(KEPT) | {"text": "", "reasoning": "", "calls": []}
            assert "delta" not in chunk or chunk["delta"].get("role") == "assistant", "the role comes first"
        so_far, delta = choices[chunk["index"]], chunk.get("delta", {})
        assert so_far["finish_reason"] is None, "nothing comes after finish_reason"
        so_far["text"] += (delta.get("content") or "") if "delta" in chunk else chunk["text"]
        so_far["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            _call(so_far["calls"], call)
        so_far["finish_reason"], so_far["stop_reason"] = chunk["finish_reason"], chunk.get("stop_reason")
        so_far["prompt_token_ids"] = so_far["prompt_token_ids"] or chunk.get("prompt_token_ids")
        if "token_ids" in chunk:
            so_far["token_ids"] = [*(so_far["token_ids"] or ()), *chunk["token_ids"]]
        if chunk["logprobs"]:
            before = so_far["logprobs"] or {name: [] for name in chunk["logprobs"]}
            so_far["logprobs"] = {name: _joined(before[name], value) for name, value in chunk["logprobs"].items()}
    assert all(choice["finish_reason"] for choice in choices.values()), "one finish_reason for each choice"
    return {"choices": choices, "usage": usage, "beside": beside}


def _joined(before: Any, more: Any) -> Any:
    return None if more is None else [*before, *more]


def _call(calls: list[tuple[str, str]], delta: dict[str, Any]) -> None:
    """Merge a call's delta: the name comes once, its arguments in parts."""
    if delta["index"] == len(calls):
        calls.append((delta["function"]["name"], ""))
    name, arguments = calls[delta["index"]]
    calls[delta["index"]] = name, arguments + (delta["function"].get("arguments") or "")


def _response(events: list[Any]) -> dict[str, Any]:
    """Read a response: the last event has all of it, and the deltas must add up to that."""
    assert [event["sequence_number"] for event in events] == list(range(len(events))), "sequence numbers are consecutive"
    kinds = [event["type"] for event in events]
    assert kinds[:2] == _BEGIN and kinds[-1] in _END, kinds
    response: dict[str, Any] = events[-1]["response"]
    told: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            told[event["output_index"]] = told.get(event["output_index"], "") + event["delta"]
            logprobs.setdefault(event["output_index"], []).extend(event.get("logprobs") or ())
    for at, item in enumerate(response["output"]):
        parts = item.get("content") or []
        text = item["arguments"] if item["type"] == "function_call" else "".join(part["text"] for part in parts)
        assert told.get(at, "") == text, f"deltas {told.get(at)!r}, and in the end {text!r}"
        assert item["type"] != "message" or logprobs.get(at, []) == [one for part in parts for one in part["logprobs"]], "log-probabilities"
    kept: dict[str, Any] = _plain(response)
    return kept


def _message(events: list[Any]) -> dict[str, Any]:
    events = [event for event in events if event["type"] != "ping"]
    assert events[0]["type"] == "message_start" and [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | ({"input": ""} if event["content_block"]["type"] == "tool_use" else {}))
            case "content_block_delta":
                _add(blocks[event["index"]], event["delta"])
            case kind:
                assert kind == "content_block_stop" and event["index"] == len(blocks) - 1
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = from_json(block["input"], allow_partial=True) if block["input"].strip() else {}  # it may have been truncated
    kept: dict[str, Any] = _plain(message | events[-2]["delta"] | {"content": blocks, "usage": events[-2]["usage"]})
    return kept


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    names = {"text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking"), "input_json_delta": ("input", "partial_json")}
    if delta["type"] == "signature_delta":
        block["signature"] = delta["signature"]
        return
    mine, theirs = names[delta["type"]]
    block[mine] += delta[theirs]
