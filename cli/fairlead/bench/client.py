"""One streaming completion and its times, over aiohttp: its parser is in C, so that the client does not limit the measurement."""

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fairlead.bench.datasets import Prompt
from fairlead.errors import UserError

_EVENT_END = re.compile(rb"\r?\n\r?\n")


@dataclass
class Outcome:
    """The result of one request. Times are in seconds; `started` is on `time.perf_counter`'s clock."""

    prompt_len: int
    started: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    pod: str = ""
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        return not self.error


async def complete(session: aiohttp.ClientSession, url: str, body: dict[str, Any], prompt_len: int) -> Outcome:
    """POST `body` (with `stream`) and read the stream to its end. Errors of the server go to `Outcome.error`."""
    outcome = Outcome(prompt_len, started=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            outcome.pod = response.headers.get("X-Fairlead-Pod", "")
            predicted = response.headers.get("X-Fairlead-Predicted-Tokens", "")
            outcome.predicted_tokens = int(predicted) if predicted.isdigit() else None
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return outcome
            await _read_stream(response, outcome)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if not outcome.error and not outcome.ttft:
        outcome.error = "the stream ended without a token"
    return outcome


async def _read_stream(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read server-sent events. Each event with a choice counts as one arrival of tokens."""
    pending = b""
    last = outcome.started
    parts: list[str] = []
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        *events, pending = _EVENT_END.split(pending + piece)
        for event in events:
            if not event.startswith(b"data:"):
                continue
            data = event[5:].strip()
            if data == b"[DONE]":
                continue
            message = json.loads(data)
            if "error" in message:
                outcome.error = f"in the stream: {json.dumps(message['error'])[:300]}"
                return
            if message.get("choices"):
                choice = message["choices"][0]
                if _opens_message(choice):
                    continue
                parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
                if not outcome.ttft:
                    outcome.ttft = now - outcome.started
                else:
                    outcome.itl.append(now - last)
                last = now
                outcome.latency = now - outcome.started
            usage = message.get("usage")
            if usage:
                outcome.output_tokens = usage.get("completion_tokens") or 0
                outcome.prompt_len = usage.get("prompt_tokens") or outcome.prompt_len
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.text = "".join(parts)
    outcome.output_tokens = outcome.output_tokens or len(outcome.itl) + 1


def _opens_message(choice: dict[str, Any]) -> bool:
    """Return whether the event only names the role, as the first of a chat does before any token."""
    delta = choice.get("delta") or {}
    return "role" in delta and not any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def build_request_body(
    model: str, prompt: Prompt, *, ignore_eos: bool, temperature: float, text: str | None = None, chat: bool = False
) -> dict[str, Any]:
    """Return the body of a completion, or with `chat` of a chat completion of one message, which needs `text`.

    Without `text` the prompt is token ids, so its length is exact.
    """
    asked = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text if text is not None else list(prompt.tokens)}
    body: dict[str, Any] = {
        "model": model,
        **asked,
        "max_tokens": prompt.output_len,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignore_eos:
        body["ignore_eos"] = True
    return body


async def fetch_first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    answer = await _json(session, "GET", f"{base_url}/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{base_url}/v1/models lists no model: give --model") from None


async def fetch_vocabulary(session: aiohttp.ClientSession, base_url: str, model: str, text: str) -> Sequence[int]:
    """Return the token ids of ordinary text, from the server's tokenizer. They include no special token."""
    answer = await _json(session, "POST", f"{base_url}/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    try:
        return sorted(set(answer["tokens"]))
    except (KeyError, TypeError):
        raise UserError(f"{base_url}/tokenize returned no tokens: give --vocab-size N to use ids below N") from None


async def detokenize(session: aiohttp.ClientSession, base_url: str, model: str, tokens: Sequence[int]) -> str:
    answer = await _json(session, "POST", f"{base_url}/detokenize", {"model": model, "tokens": list(tokens)})
    return str(answer["prompt"])


async def _json(session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    try:
        async with session.request(method, url, json=body) as response:
            if response.status != 200:
                raise UserError(f"{method} {url}: HTTP {response.status}: {(await response.text())[:200]}")
            return await response.json(content_type=None)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UserError(f"{method} {url}: {error}. Check --base-url and that the server runs") from None
