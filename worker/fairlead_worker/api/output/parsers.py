"""Parsers for the answers of the loaded model, and grammars that let the model reason first."""

from array import array
from collections.abc import Callable

import msgspec

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.output.thinking_markers import find_thinking_markers
from fairlead_worker.api.output.tool_choice import ToolUse
from fairlead_worker.grammar.constraint import Constraint, ReasoningMarkers
from fairlead_worker.ipc.messages import ThinkingBudget
from fairlead_worker.parsing.families import KIMI_CALL, TAIL_TOKENS, ModelParsers, ParserOptions
from fairlead_worker.parsing.stage import Parser, Tools

ANY_OBJECT = '{"type":"object"}'
"""The schema of `json_object`."""
_NO_CALLS = ("json", "choice")
"""Constraint kinds that exclude tool calls: text that looks like a call is part of the answer."""


class OutputParsers:
    """The output parsers of a loaded model."""

    def __init__(self, parser_selection: ModelParsers, encoder: PromptEncoder) -> None:
        self.visible_special_tokens = encoder.find_special_tokens(parser_selection.collect_markers())
        """Special tokens that the parsers look for."""
        self._model_parsers, self._encoder = parser_selection, encoder
        self._call_tokens = encoder.find_special_tokens(KIMI_CALL) if parser_selection.tool_parser == "kimi_k2" else frozenset()
        self._thinking_markers, self.budget_problem = find_thinking_markers(parser_selection, encoder)
        """`budget_problem`: why this model takes no thinking budget; empty: it does."""

    def build_constraint(self, requested: Constraint | None, tool_use: ToolUse, prompt: "array[int]") -> Constraint | None:
        """Return the constraint of an answer to `prompt`. Raise ApiError 400 if the request has a format and also requires a call."""
        if requested is None and not tool_use.functions:
            return None
        forced = tool_use.build_constraint()
        if forced is not None and requested is not None and (requested.kind, requested.text) == ("json", ANY_OBJECT):
            requested = None  # the arguments of a call are a JSON object
        if requested is not None and forced is not None:
            raise invalid(
                f"tool_choice: an answer that must be a call cannot also have the format of {requested.field}", param="tool_choice"
            )
        constraint = forced or requested or tool_use.build_strict_tags(self._model_parsers.tool_parser)
        format = self._model_parsers.reasoning_format
        if constraint is None or format is None:
            return constraint
        tail = self._tail(prompt)
        if self._model_parsers.ends_after_reasoning(tail):
            return constraint
        return msgspec.structs.replace(
            constraint, reasoning=ReasoningMarkers(format.start, format.end, self._model_parsers.ends_in_reasoning(tail), format.answer)
        )

    def build_thinking_budget(self, tokens: int, prompt: "array[int]") -> ThinkingBudget | None:
        """Return the budget of an answer to `prompt`; None after reasoning. Raise ApiError 400 if this model takes none."""
        markers, tail = self._thinking_markers, self._tail(prompt)
        if markers is None:
            raise invalid(f"thinking_token_budget: {self.budget_problem}; leave it out", param="thinking_token_budget")
        if self._model_parsers.ends_after_reasoning(tail):
            return None
        used = markers.count_after_start(prompt[-TAIL_TOKENS:]) if self._model_parsers.ends_in_reasoning(tail) else None
        return ThinkingBudget(tokens, markers.start, markers.end, markers.blank, used)

    def build_parser_factory(self, constraint: Constraint | None, tool_use: ToolUse, prompt: "array[int]") -> Callable[[], Parser | None]:
        """Return a function that creates a parser for each answer to `prompt`. It returns None if the whole answer is text."""
        constrained = constraint is not None and constraint.kind != "structural_tag"
        may_call = tool_use.is_required or constraint is None or constraint.kind not in _NO_CALLS
        options = ParserOptions(
            tools=tool_use.tools if may_call and tool_use.functions else Tools(),
            only_calls=tool_use.is_required,
            required_tool=tool_use.required_function,
            has_grammar=constrained,
            earlier_calls=sum(map(prompt.count, self._call_tokens)),
        )
        if not self._model_parsers.needs_parser(options):
            return lambda: None
        tail = self._tail(prompt)
        return lambda: self._model_parsers.create_parser(options, tail)

    def _tail(self, prompt: "array[int]") -> str:
        return self._encoder.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
