"""What a request may say of its answer's form, and what the checker's process hears and says of it. Light: the API's process imports it."""

from typing import Literal

import msgspec

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag", "calls"]


class ReasoningMarkers(msgspec.Struct, frozen=True):
    """Reasoning that may come before what has a form."""

    start: str
    end: str
    is_open: bool
    """The prompt has ended with `start`: reasoning there is. Else an answer may do without."""
    answer: str = ""
    """What an answer without reasoning begins with."""


class Constraint(msgspec.Struct, frozen=True):
    """The form that one request asks for."""

    kind: Kind
    text: str
    """A JSON schema, a regular expression, a JSON array of strings, a grammar (EBNF or Lark), a structural tag's JSON, or for `calls`
    `{"tools": [{"name", "schema"}], "one": at most one}`."""
    field: str
    """Of the request, for errors."""
    whitespace: str | None = None
    """Regular expression between the parts of JSON; None: WHITESPACE, "" : nothing."""
    reasoning: ReasoningMarkers | None = None


class Setup(msgspec.Struct, frozen=True):
    """What the first line says."""

    tokenizer_json: str
    vocabulary: int
    eos: tuple[int, ...]
    timeout: float
    """Seconds for one grammar. The parent's clock kills; should the parent be gone, this process's own alarm does."""
    memory: int
    """Bytes of address space."""


class Verdict(msgspec.Struct, frozen=True):
    """What became of a line."""

    error: str = ""
    grammar: str = ""
    """For the engine."""
