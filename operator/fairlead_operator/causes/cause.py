"""A cause, and how its message is built."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LONGEST = 1024  # characters of a message: the limit of an Event


@dataclass(frozen=True)
class Cause:
    """A reason for machines, a message for people, and whether it is a fault (rather than work in progress)."""

    reason: str
    message: str
    fault: bool
    weights: bool = False  # the model cannot be fetched, read or held in memory: condition WeightsReady
    template: bool = False  # pods of this template are refused: condition PodTemplateValid


def make_cause(reason: str, what: str, do: str, *, fault: bool = True, weights: bool = False, template: bool = False) -> Cause:
    """Return a cause that says `what` is wrong and what to `do`. A long description is truncated, the advice is not."""
    what = truncate(what.strip().rstrip("."), LONGEST - len(do) - 2)
    return Cause(reason, f"{what}. {do}", fault, weights, template)


def truncate(message: str, longest: int = LONGEST) -> str:
    return message if len(message) <= longest else message[: longest - 1] + "…"


def find_advice(table: Iterable[tuple[str, str]], message: str, words: Mapping[str, str], flags: re.RegexFlag = re.NOFLAG) -> list[str]:
    """Return the advice of each pattern that the message has, in the order of the table: with the pattern's groups, and `words`."""
    found = ((re.search(pattern, message, flags), text) for pattern, text in table)
    return [text.format(*match.groups(), **words) for match, text in found if match]


def last_line(text: str) -> str:
    """Return the last line that is not blank: in a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
