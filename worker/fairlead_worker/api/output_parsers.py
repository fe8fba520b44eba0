"""How answers of this model are read: by the parsers of its family, and with a grammar that lets it think first."""

from array import array
from collections.abc import Callable

import msgspec

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.tool_choice import ToolUse
from fairlead_worker.grammar.constraint import Constraint, Thought
from fairlead_worker.parsing.families import TAIL_TOKENS, Reader, Wish
from fairlead_worker.parsing.stage import Parser, Tools

_NO_CALLS = ("json", "choice")
"""Forms in which there is no room for a call: what looks like one is the answer."""


class Reading:
    """The parsers of a model that is loaded."""

    def __init__(self, reader: Reader, encoder: PromptEncoder) -> None:
        self.shown = encoder.find_special_tokens(reader.markup())
        """Special tokens that its parsers look for."""
        self._reader, self._encoder = reader, encoder

    def form(self, asked: Constraint | None, use: ToolUse, prompt: "array[int]") -> Constraint | None:
        """The grammar of an answer to `prompt`. Raises ApiError 400 where the client asks for one and for calls."""
        forced = use.constraint()
        if asked is not None and forced is not None:
            raise invalid(f"tool_choice: an answer that has to be a call cannot have the form of {asked.field} too", param="tool_choice")
        form = forced or asked or use.strict_tags(self._reader.calls)
        format = self._reader.thinking_format
        if form is None or format is None or form.kind == "structural_tag":
            return form
        tail = self._tail(prompt)
        if self._reader.closed(tail):
            return form
        return msgspec.structs.replace(form, thought=Thought(format.start, format.end, self._reader.opened(tail), format.answer))

    def parsers(self, form: Constraint | None, use: ToolUse, prompt: "array[int]") -> Callable[[], Parser | None]:
        """A parser for each answer to `prompt`; None where all of it is text."""
        constrained = form is not None and form.kind != "structural_tag"
        callable = use.must or form is None or form.kind not in _NO_CALLS
        wish = Wish(use.tools if callable else Tools(), use.must, use.named, constrained)
        if not self._reader.reads(wish):
            return lambda: None
        tail = self._tail(prompt)
        return lambda: self._reader.parser(wish, tail)

    def _tail(self, prompt: "array[int]") -> str:
        return self._encoder.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
