"""A schedule trace as data: steps of rows, each a chunk of a prompt or a decode."""

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
    decoder, ends, steps = msgspec.json.Decoder(_Line), dict[str, int](), []
    for number, line in enumerate(lines[1:], 2):
        try:
            raw = decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number}: {error}") from None
        rows = []
        for request, start, count, samples in raw.rows:
            # A decode computes the one token that was sampled in the step before it.
            rows.append(Row(request, start, count, samples, decode=samples and count == 1 and ends.get(request) == start))
            if samples:
                ends[request] = start + count
            else:
                ends.pop(request, None)
        steps.append(Step(raw.step, raw.at, raw.seconds, tuple(rows)))
    return Trace(about, tuple(steps))
