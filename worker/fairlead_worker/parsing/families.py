"""Selection of a model's parsers: by flags, or by its chat template, which shows how the model was trained to call tools."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fairlead_worker.parsing import harmony
from fairlead_worker.parsing.json_calls import FORCED_CALLS, Format, JsonFormat, NamedCall, TextWithCalls
from fairlead_worker.parsing.parameter_calls import ParameterFormat
from fairlead_worker.parsing.pythonic import PythonicFormat
from fairlead_worker.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningStage
from fairlead_worker.parsing.registry import (
    CALLS,
    HARMONY,
    find_call_format,
    find_reasoning_format,
    reasoning_plugins,
    tool_call_plugins,
)
from fairlead_worker.parsing.stage import NewId, Parser, PlainText, Stage, Tools, call_id, kimi_call_id, short_call_id

TOOL_CALL_PARSERS = ("auto", "none", HARMONY, *CALLS)
REASONING_PARSERS = ("auto", "none", HARMONY, *REASONING_FORMATS)
TAIL_TOKENS = 32
"""Tokens at the end of a prompt in which a reasoning start marker is searched."""

_CALL_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("glm45", ("<arg_key>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v32", ("<｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4_mini", ("<|tool_call|>", "<|tool|>")),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('{"name": function name, "parameters":',)),
)
"""(parser, strings in a template that teaches its format). More specific formats come first."""
_REASONING_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)
_NEW_IDS: dict[str, NewId] = {"mistral": short_call_id, "kimi_k2": kimi_call_id}
"""Ids that a family's template prints in the next prompt have the form that the model was trained on."""
KIMI_CALL = "<|tool_call_begin|>"
"""The token before each call in a prompt of Kimi K2."""


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """The parser settings of a request."""

    tools: Tools = field(default_factory=Tools)
    """Tools that may be called. Empty: no text is read as a call."""
    only_calls: bool = False
    """True if a grammar restricts the answer to calls: the list of `FORCED_CALLS`, or the arguments of `required_tool`."""
    required_tool: str = ""
    has_grammar: bool = False
    """True if a grammar restricts the answer after the reasoning."""
    earlier_calls: int = 0
    """Calls in the prompt, where ids of calls count them."""


@dataclass(frozen=True)
class ModelParsers:
    """The parser names of one model. An empty name means no parser."""

    tool_parser: str = ""
    reasoning_parser: str = ""

    @cached_property
    def tool_format(self) -> Format | None:
        return find_call_format(self.tool_parser)

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """Return the reasoning format, which a grammar must allow before the answer."""
        return harmony.REASONING_FORMAT if self.reasoning_parser == HARMONY else find_reasoning_format(self.reasoning_parser)

    def needs_parser(self, options: ParserOptions) -> bool:
        """Return False if all of an answer is text, so that it needs no parser."""
        return bool(self.reasoning_parser) or options.only_calls or (bool(self.tool_parser) and bool(options.tools.schemas))

    def ends_in_reasoning(self, tail: str) -> bool:
        """Return True if the prompt ends inside reasoning, because its template has written the start marker."""
        format = self.reasoning_format
        if format is None:
            return False
        tail = tail.rstrip()
        return tail.endswith(format.start) or (format.always and not tail.endswith(format.end))

    def ends_after_reasoning(self, tail: str) -> bool:
        """Return True if the prompt ends after reasoning, because its template disables reasoning."""
        format = self.reasoning_format
        return format is not None and tail.rstrip().endswith(format.end)

    def create_parser(self, options: ParserOptions, tail: str) -> Parser:
        """Return the parser of one answer. `tail`: the end of its prompt."""
        new_id = _NEW_IDS.get(self.tool_parser, call_id)
        if self.reasoning_parser == HARMONY and not options.only_calls and not options.has_grammar:
            return Parser(harmony.Messages(), options.tools if self.tool_parser else Tools(), new_id, options.earlier_calls)
        stage: Stage = PlainText()
        if options.required_tool:
            stage = NamedCall(options.required_tool)
        elif options.only_calls:
            stage = TextWithCalls(FORCED_CALLS)
        elif options.tools.schemas and self.tool_format is not None:
            stage = TextWithCalls(self.tool_format)
        format = self.reasoning_format
        if format is not None:
            stage = ReasoningStage(format, self.ends_in_reasoning(tail), stage)
        return Parser(stage, options.tools, new_id, options.earlier_calls)

    def collect_markers(self) -> str:
        """Return all markup of the formats. Special tokens in it must stay visible in the decoded text."""
        parts: list[str] = list(harmony.MARKERS) if HARMONY in (self.tool_parser, self.reasoning_parser) else []
        if (thinking := self.reasoning_format) is not None:
            parts += [thinking.start, thinking.end]
        match format := self.tool_format:
            case JsonFormat(markers=markers, head=head, tail=tail):
                parts += [*markers, head, tail]
            case ParameterFormat(markers=markers, head=head, parameter=parameter, value_end=end, tail=tail):
                parts += [*markers, head, parameter, end, tail]
            case PythonicFormat(markers=markers):
                parts += [*markers, "<|python_end|>"]
            case Format():
                parts += format.markers
        if self.tool_parser not in CALLS and (plugin := tool_call_plugins().get(self.tool_parser)) is not None:
            parts += plugin.markup
        return "\0".join(parts).replace("\\", "")


def select_parsers(tool_call_parser: str, reasoning_parser: str, templates: Sequence[str]) -> tuple[ModelParsers, str]:
    """Return (parsers for a model with these chat templates, the reasons in words).

    A format of another package comes before Fairlead's: its author knows the model. Raises ValueError for an invalid combination, and
    PluginError, a ValueError too, for a plug-in that cannot be used.
    """
    text = "\0".join(templates)
    call_signs = (*((name, plugin.signs) for name, plugin in tool_call_plugins().items()), *_CALL_SIGNS)
    reasoning_signs = (*((name, plugin.signs) for name, plugin in reasoning_plugins().items()), *_REASONING_SIGNS)
    calls = _detect(text, call_signs) if tool_call_parser == "auto" else tool_call_parser
    thinking = _detect(text, reasoning_signs) if reasoning_parser == "auto" else reasoning_parser
    if calls == HARMONY != thinking:  # harmony is one format for both
        calls, thinking = _resolve_harmony(calls, HARMONY, tool_call_parser, reasoning_parser)
    elif thinking == HARMONY and calls not in (HARMONY, "none"):
        calls, thinking = _resolve_harmony(HARMONY, thinking, tool_call_parser, reasoning_parser)
    selected = ModelParsers("" if calls == "none" else calls, "" if thinking == "none" else thinking)
    shown = ", ".join(
        f"{name}: {value or 'none'} ({'from the chat template' if flag == 'auto' else 'as the flag says'})"
        for name, value, flag in (
            ("tool calls", selected.tool_parser, tool_call_parser),
            ("reasoning", selected.reasoning_parser, reasoning_parser),
        )
    )
    return selected, shown


def _resolve_harmony(calls: str, thinking: str, tool_call_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Use harmony for calls and reasoning, unless a flag names another parser. Then use it for neither."""
    if HARMONY in (tool_call_parser, reasoning_parser) and {tool_call_parser, reasoning_parser} - {"auto", HARMONY}:
        flags = f"--tool-call-parser {tool_call_parser} and --reasoning-parser {reasoning_parser}"
        raise ValueError(f"{flags} do not go together: harmony is for both")
    if reasoning_parser not in ("auto", HARMONY):
        return "none", reasoning_parser
    if tool_call_parser not in ("auto", HARMONY):
        return tool_call_parser, "none"
    return calls, thinking


def _detect(text: str, signs: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    return next((name for name, parts in signs if parts and all(part in text for part in parts)), "none")
