"""Harmony, the format of gpt-oss: an answer is messages, each on a channel.

`<|channel|>analysis<|message|>…<|end|>` is reasoning, `final` is the answer, and `commentary` a call where it has a recipient
(https://github.com/openai/harmony, docs/format.md).
"""

from dataclasses import dataclass

import regex

from fairlead_worker.parsing.pattern import match
from fairlead_worker.parsing.stage import Out, Plain, Stage, first, overlap
from fairlead_worker.parsing.thinking import ThinkingFormat

MARKERS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
_FINAL = "<|channel|>final<|message|>"
THINKING = ThinkingFormat("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{_FINAL}", answer=_FINAL)
"""Where a grammar makes the answer: reasoning, or none, and then the final channel."""
_HEADER = (
    r"\s*(?:<\|start\|>)?(?:assistant)?(?:\s*to=(?P<to>[^\s<]{1,256}))?"
    r"\s*<\|channel\|>(?P<channel>\w{1,32})(?P<more>[^<]{0,512}(?:<\|constrain\|>[^<]{0,64})?)<\|message\|>"
)
_RECIPIENT = r"to=(?:functions\.)?(?P<name>[^\s<]{1,256})"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_BETWEEN = ("<|start|>", "<|channel|>")
"""These begin the next message, the others end one."""


class Messages:
    """Before a message. An answer that does not begin as one is text: a grammar may have asked for it."""

    thinks = False

    def take(self, text: str, final: bool, out: Out) -> tuple[str, Stage]:
        found = match(_HEADER, text, partial=not final)
        if found is not None and found.partial:
            return text, self
        if found is None:
            return text, Plain()
        named = regex.search(_RECIPIENT, f"to={found['to']}" if found["to"] else found["more"])
        name = named["name"] if named is not None else ""
        if found["channel"] == "analysis" and not name:
            return text[found.end() :], _Body("reasoning", self)
        if name and name in out.tools.schemas:
            out.begin(name)
            return text[found.end() :], _Body("call", self)
        if name:  # of no tool: what it says is not lost
            out.text(text[: found.end()])
        return text[found.end() :], _Body("text", self)


@dataclass(slots=True)
class _Body:
    """The content of a message."""

    kind: str
    back: Stage

    @property
    def thinks(self) -> bool:
        return self.kind == "reasoning"

    def take(self, text: str, final: bool, out: Out) -> tuple[str, Stage]:
        at, marker = first(text, _ENDS)
        if marker:
            self._say(text[:at], out)
            self._over(out)
            return text[at if marker in _BETWEEN else at + len(marker) :], self.back
        keep = 0 if final else overlap(text, _ENDS)
        self._say(text[: len(text) - keep], out)
        if final:
            self._over(out)
            return "", self.back
        return text[len(text) - keep :], self

    def _say(self, text: str, out: Out) -> None:
        match self.kind:
            case "reasoning":
                out.reasoning(text)
            case "call":
                out.arguments(text)
            case _:
                out.text(text)

    def _over(self, out: Out) -> None:
        if self.kind == "reasoning":
            out.answer()
        elif self.kind == "call":
            out.end()
