"""A schedule trace as data: steps of rows, each a chunk of a prompt or a decode."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

FORMAT = "fairlead-schedule-1"


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: tokens `start` to `start + count` of it."""

    request: str
    start: int
    count: int
    samples: bool
    decode: bool
    """Whether it continues from a token that it sampled; otherwise it prefills."""
    accepted: int | None = None
    """Accepted draft tokens of a decode; None if no later row of the request shows them."""

    @property
    def drafted(self) -> int:
        """Draft tokens that a decode verifies."""
        return self.count - 1 if self.decode else 0


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    at: float
    """Seconds from the start of the trace to the end of this step."""
    seconds: float
    rows: tuple[Row, ...]

    @property
    def prefill_tokens(self) -> int:
        return sum(row.count for row in self.rows if not row.decode)

    @property
    def decodes(self) -> int:
        return sum(row.decode for row in self.rows)

    @property
    def speculation(self) -> tuple[int, int]:
        """Draft tokens whose verification is known, and the accepted ones among them."""
        known = [(row.drafted, row.accepted) for row in self.rows if row.accepted is not None]
        return sum(drafted for drafted, _ in known), sum(accepted for _, accepted in known)


@dataclass(frozen=True, slots=True)
class Trace:
    about: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def requests(self) -> list[str]:
        """The requests in the order of their first rows."""
        return list(dict.fromkeys(row.request for step in self.steps for row in step.rows))

    def part(self, first: int, last: int) -> "Trace":
        """Return steps `first` to `last`, both included."""
        return Trace(self.about, tuple(step for step in self.steps if first <= step.number <= last))


class _Line(msgspec.Struct):
    step: int
    at: float
    seconds: float
    rows: list[tuple[str, int, int, bool]]


class NotATrace(ValueError):
    """The text is no trace, or a line of it is wrong."""


def parse(lines: Sequence[bytes]) -> Trace:
    """Parse the lines of a trace, or its first line and some later ones. An incomplete last line is ignored. Raises NotATrace."""
    try:
        about = msgspec.json.decode(lines[0], type=dict[str, Any])
    except (IndexError, msgspec.DecodeError):
        about = {}
    if about.get("format") != FORMAT:
        raise NotATrace("not a schedule trace; `fairlead-worker --trace-schedule FILE` writes one")
    decoder, raw = msgspec.json.Decoder(_Line), list[_Line]()
    for number, line in enumerate(lines[1:], 2):
        try:
            raw.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise NotATrace(f"line {number}: {error}") from None
    return Trace(about, tuple(_steps(raw)))


def describe(trace: Trace) -> str:
    """Return the trace's totals and its settings, in two lines."""
    steps = trace.steps
    about = ", ".join(f"{name} {value}" for name, value in trace.about.items() if name != "format")
    drafted, accepted = (sum(counts) for counts in zip(*(step.speculation for step in steps), strict=True))
    verified = f", {accepted} of {drafted} draft tokens accepted" if drafted else ""
    mixed = sum(1 for step in steps if step.decodes and step.prefill_tokens)
    return (
        f"{len(steps)} steps ({mixed} mixed), {len(trace.requests)} requests, {sum(step.seconds for step in steps):.3f} s computing; "
        f"{sum(step.prefill_tokens for step in steps)} prefill tokens, {sum(step.decodes for step in steps)} decodes{verified}\n{about}"
    )


def _steps(lines: list[_Line]) -> Iterator[Step]:
    ends, next_starts = dict[str, int](), _next_starts(lines)
    for at, line in enumerate(lines):
        rows = []
        for request, start, count, samples in line.rows:
            # A decode computes the token sampled in the step before, and the draft tokens after it. The next row starts after the
            # accepted ones.
            decode = samples and request in ends and start >= ends[request]
            accepted = None
            after = next_starts.get((at, request))
            if decode and count > 1 and after is not None and start < after <= start + count:
                accepted = after - start - 1
            rows.append(Row(request, start, count, samples, decode, accepted))
            if samples:
                ends[request] = start + (1 if decode else count)
            else:
                ends.pop(request, None)
        yield Step(line.step, line.at, line.seconds, tuple(rows))


def _next_starts(lines: list[_Line]) -> dict[tuple[int, str], int]:
    """Return (index of a line, request) → start of the request's next row. A request's last row has no entry."""
    starts, starts_after = dict[str, int](), dict[tuple[int, str], int]()
    for at in range(len(lines) - 1, -1, -1):
        for request, start, _, _ in lines[at].rows:
            if request in starts:
                starts_after[at, request] = starts[request]
            starts[request] = start
    return starts_after
