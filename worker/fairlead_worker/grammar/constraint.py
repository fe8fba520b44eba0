"""The answer formats of requests, and the messages of the checker process. Without heavy imports, for the API process."""

from typing import Literal

import msgspec

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "calls"]


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """Markers of optional reasoning before a constrained answer."""

    start: str
    end: str
    is_open: bool
    """True if the prompt ended with `start`, so that reasoning is certain. Else the answer may have none."""
    answer: str = ""
    """The start of an answer without reasoning."""


class Constraint(msgspec.Struct, frozen=True):
    """The answer format of one request."""

    kind: Kind
    text: str
    """A JSON schema, a regular expression, a JSON array of strings, a grammar (EBNF or Lark), a structural tag's JSON, or for `calls`
    `{"tools": [{"name", "schema"}], "one": at most one}`."""
    field: str
    """Field of the request, for errors."""
    whitespace: str | None = None
    """Regular expression for whitespace in JSON. None: WHITESPACE. Empty: no whitespace."""
    reasoning: ReasoningMarkers | None = None
    fields: tuple[str, ...] = ()
    """Field of each tool's schema, for errors, if the constraint has the schemas of several tools."""


class Setup(msgspec.Struct, frozen=True):
    """The first line of the checker's input."""

    tokenizer_json: str
    vocabulary: int
    eos: tuple[int, ...]
    timeout: float
    """Seconds for one grammar. The parent kills the process after that. If the parent is gone, the process's own alarm does."""
    memory: int
    """Address space in bytes."""


class Verdict(msgspec.Struct, frozen=True):
    """The checker's answer to a line."""

    error: str = ""
    field: str = ""
    """Field that the error is about. Empty: the constraint's."""
    grammar: str = ""
    """The grammar for the engine."""
    cpu_seconds: float = 0.0
    """CPU time of checking it, and of compiling it once more, as the engine does."""
