"""A schedule trace as data: steps of rows, each a chunk of a prompt or a decode."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from fairlead.errors import UserError

FORMAT = "fairlead-schedule-1"


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: tokens `start` to `start + count` of it."""

    request: str
    start: int
    count: int
    samples: bool
    decode: bool
    """It goes on from a token that it sampled; otherwise it prefills."""
    accepted: int | None = None
    """Of a decode's guesses, those that were right; None where no later row of the request tells."""

    @property
    def guesses(self) -> int:
        """Tokens behind the known ones that a decode computes too."""
        return self.count - 1 if self.decode else 0


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    at: float
    """Seconds from the trace's beginning to this step's end."""
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
        """Guesses of which the fate is known, and those of them that were right."""
        known = [(row.guesses, row.accepted) for row in self.rows if row.accepted is not None]
        return sum(guesses for guesses, _ in known), sum(accepted for _, accepted in known)


@dataclass(frozen=True, slots=True)
class Trace:
    about: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def requests(self) -> list[str]:
        """In the order in which they began."""
        return list(dict.fromkeys(row.request for step in self.steps for row in step.rows))

    def part(self, first: int, last: int) -> "Trace":
        """Steps `first` to `last`, both included."""
        return Trace(self.about, tuple(step for step in self.steps if first <= step.number <= last))


class _Line(msgspec.Struct):
    step: int
    at: float
    seconds: float
    rows: list[tuple[str, int, int, bool]]


def read(path: Path) -> Trace:
    """The trace in `path`. A last line that a killed worker left half written is passed over. UserError for anything else."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    try:
        about = msgspec.json.decode(lines[0], type=dict[str, Any])
    except (IndexError, msgspec.DecodeError):
        about = {}
    if about.get("format") != FORMAT:
        raise UserError(f"{path}: no schedule trace; `fairlead-worker --trace-schedule FILE` writes one")
    decoder, raw = msgspec.json.Decoder(_Line), list[_Line]()
    for number, line in enumerate(lines[1:], 2):
        try:
            raw.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: {error}") from None
    return Trace(about, tuple(_steps(raw)))


def _steps(lines: list[_Line]) -> Iterator[Step]:
    ends, following = dict[str, int](), _following(lines)
    for at, line in enumerate(lines):
        rows = []
        for request, start, count, samples in line.rows:
            # A decode computes the one token that was sampled in the step before it, and what it guesses behind that: of these the
            # accepted ones are computed, so that the next row begins behind them.
            decode = samples and request in ends and start >= ends[request]
            accepted = None
            after = following.get((at, request))
            if decode and count > 1 and after is not None and start < after <= start + count:
                accepted = after - start - 1
            rows.append(Row(request, start, count, samples, decode, accepted))
            if samples:
                ends[request] = start + (1 if decode else count)
            else:
                ends.pop(request, None)
        yield Step(line.step, line.at, line.seconds, tuple(rows))


def _following(lines: list[_Line]) -> dict[tuple[int, str], int]:
    """(place of a line, request) → where the request's next row starts; without those of last rows."""
    starts, made = dict[str, int](), dict[tuple[int, str], int]()
    for at in range(len(lines) - 1, -1, -1):
        for request, start, _, _ in lines[at].rows:
            if request in starts:
                made[at, request] = starts[request]
            starts[request] = start
    return made
