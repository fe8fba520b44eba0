"""One cause, and how its words are put together."""

from dataclasses import dataclass

LONGEST = 1024  # characters of a message: an Event takes no more


@dataclass(frozen=True)
class Cause:
    """One word for machines, sentences for people, and whether it is a fault (rather than work under way)."""

    reason: str
    message: str
    fault: bool
    weights: bool = False  # the model cannot be had, read or held: condition WeightsReady
    template: bool = False  # pods of this template are refused: condition PodTemplateValid


def make_cause(reason: str, what: str, do: str, *, fault: bool = True, weights: bool = False, template: bool = False) -> Cause:
    """`what` is wrong, and what to `do`: a long story is cut, the advice stays whole."""
    what = truncate(what.strip().rstrip("."), LONGEST - len(do) - 2)
    return Cause(reason, f"{what}. {do}", fault, weights, template)


def truncate(message: str, longest: int = LONGEST) -> str:
    return message if len(message) <= longest else message[: longest - 1] + "…"


def last_line(text: str) -> str:
    """The last line that says something: of a traceback, the exception."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
