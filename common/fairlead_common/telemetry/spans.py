"""Spans of a request, as the code that opens them sees them. Without tracing every span is `NO_SPAN`, whose methods do nothing."""

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal, Self

Headers = Iterable[tuple[bytes, bytes]]
Value = str | int | float | bool
Kind = Literal["server", "client", "internal"]
TRACEPARENT: Final = b"traceparent"
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*")


class Span:
    """A part of a request's time. This class records nothing: `tracer.RecordedSpan` does.

    As a context manager it ends with the block, and an exception is its failure. Times are `time.monotonic` seconds.
    """

    __slots__ = ()
    is_recording = False
    """Whether the span is exported: tracing is on, and the trace is sampled."""
    trace_id = ""
    """32 hexadecimal digits; empty without tracing."""

    def child(self, name: str, kind: Kind = "internal", start: float | None = None) -> "Span":
        """Return a span within this one. `start`: when it began; None: now."""
        return self

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        """Add attributes. Those with None are left out."""

    def fail(self, reason: str) -> None:
        """Mark the span as failed."""

    def end(self, at: float | None = None) -> None:
        """End the span, once. `at`: when it ended; None: now."""

    def propagate(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that continue the trace in another process."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        return None


NO_SPAN: Final = Span()


def read_trace_id(headers: Headers) -> str:
    """Return the trace id of the W3C header `traceparent`; empty without a valid one."""
    for name, value in headers:
        if name == TRACEPARENT and (found := _TRACEPARENT.fullmatch(value)):
            return found[1].decode()
    return ""
