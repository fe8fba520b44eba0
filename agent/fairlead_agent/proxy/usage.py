"""Token usage in the engine's answers: whole JSON documents, and server-sent events. Pure."""

import re
from typing import Any

import msgspec

_HAS_USAGE = re.compile(rb'"usage":\s*\{')
_DONE = b"data: [DONE]"


class _Answer(msgspec.Struct):
    usage: Any = None


class Usage(msgspec.Struct):
    """Tokens of one answer; None: the engine did not tell."""

    prompt: int | None = None
    output: int | None = None
    cached: int | None = None

    def read(self, document: Any) -> None:
        """Read the usage of a JSON document of any API."""
        if not isinstance(document, dict):
            return
        for part in (document, document.get("response"), document.get("message")):
            usage = part.get("usage") if isinstance(part, dict) else None
            if isinstance(usage, dict):
                self._read_usage(usage)

    def read_answer(self, data: bytes) -> None:
        """Read the usage of a whole answer. Nothing else is built: log-probabilities of 30,000 tokens would take 0.4 s."""
        try:
            usage = msgspec.json.decode(data, type=_Answer).usage
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        self.read({"usage": usage})

    def _read_usage(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.prompt = _number(usage, "prompt_tokens", "input_tokens", or_else=self.prompt)
        self.output = _number(usage, "completion_tokens", "output_tokens", or_else=self.output)
        self.cached = _number(details, "cached_tokens", or_else=self.cached)

    @property
    def text(self) -> str:
        """The form of the router's header and comment: prompt and output tokens; empty if unknown."""
        return "" if self.prompt is None else f"{self.prompt} {self.output or 0}"


class EventStream:
    """Edits a stream: takes out the usage event that the client did not ask for, and adds the usage as a comment for the router."""

    def __init__(self, *, adds_usage: bool, hides_usage: bool) -> None:
        self.usage = Usage()
        self._adds_usage, self._hides_usage = adds_usage, hides_usage
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the bytes for the client, whole events."""
        data = self._rest + piece
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return b""
        whole, self._rest = data[:end], data[end:]
        if not _HAS_USAGE.search(whole) and _DONE not in whole:
            return whole
        return b"".join(self._edit(event + b"\n\n") for event in whole[:-2].split(b"\n\n"))

    def end(self) -> bytes:
        """Return the last bytes."""
        rest, self._rest = self._rest, b""
        return rest + self._comment()

    def _edit(self, event: bytes) -> bytes:
        if event.startswith(_DONE):
            return self._comment() + event
        if _HAS_USAGE.search(event):
            document = decode_event(event)
            self.usage.read(document)
            if self._hides_usage and isinstance(document, dict) and document.get("choices") == []:
                return b""
        return event

    def _comment(self) -> bytes:
        if not self._adds_usage or not self.usage.text:
            return b""
        self._adds_usage = False
        cached = "" if self.usage.cached is None else f" {self.usage.cached}"
        return f": usage {self.usage.text}{cached}\n\n".encode()


def decode_event(event: bytes) -> Any:
    """Return the JSON document of an event; None: it has none."""
    data = b"".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _number(fields: Any, *names: str, or_else: int | None) -> int | None:
    for name in names:
        value = fields.get(name) if isinstance(fields, dict) else None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return or_else
