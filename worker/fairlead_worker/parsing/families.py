"""Which parsers read a model's answers: named by flags, or told from its chat template, which shows how the model was taught to call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlead_worker.parsing import harmony
from fairlead_worker.parsing.json_calls import FORCED_CALLS, JSON_CALLS, JsonFormat, NamedCall, TextWithCalls
from fairlead_worker.parsing.parameter_calls import PARAMETER_CALLS, ParameterFormat
from fairlead_worker.parsing.pythonic import PythonicFormat
from fairlead_worker.parsing.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningStage
from fairlead_worker.parsing.stage import Parser, PlainText, Stage, Tools, call_id, short_call_id

CallFormat = JsonFormat | ParameterFormat | PythonicFormat
CALLS: dict[str, CallFormat] = {**JSON_CALLS, **PARAMETER_CALLS, "pythonic": PythonicFormat()}
HARMONY = "harmony"
TOOL_CALL_PARSERS = ("auto", "none", HARMONY, *CALLS)
REASONING_PARSERS = ("auto", "none", HARMONY, *REASONING_FORMATS)
TAIL_TOKENS = 32
"""Of a prompt, that are looked at for a start marker."""

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
"""(parser, what a template has that teaches its format), the more particular ones first."""
_REASONING_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """What a request wants read out of its answer."""

    tools: Tools = field(default_factory=Tools)
    """Those that may be called; none: nothing is taken for a call."""
    only_calls: bool = False
    """A grammar makes the answer nothing but calls: `FORCED`'s list, or the arguments of `named`."""
    required_tool: str = ""
    has_grammar: bool = False
    """A grammar makes the answer, after the reasoning."""


@dataclass(frozen=True, slots=True)
class ModelParsers:
    """The parsers of one model; empty names: there is none."""

    tool_parser: str = ""
    reasoning_parser: str = ""

    @property
    def tool_format(self) -> CallFormat | None:
        return CALLS.get(self.tool_parser)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """What a grammar has to let pass before the answer."""
        return harmony.REASONING_FORMAT if self.reasoning_parser == HARMONY else REASONING_FORMATS.get(self.reasoning_parser)

    def needs_parser(self, options: ParserOptions) -> bool:
        """Whether anything is to be told from text: if not, an answer needs no parser."""
        return bool(self.reasoning_parser) or options.only_calls or (bool(self.tool_parser) and bool(options.tools.schemas))

    def ends_in_reasoning(self, tail: str) -> bool:
        """Whether a prompt ends within reasoning: its template has written the start marker."""
        format = self.reasoning_format
        if format is None:
            return False
        tail = tail.rstrip()
        return tail.endswith(format.start) or (format.always and not tail.endswith(format.end))

    def ends_after_reasoning(self, tail: str) -> bool:
        """Whether a prompt ends behind reasoning: its template leaves none to do."""
        format = self.reasoning_format
        return format is not None and tail.rstrip().endswith(format.end)

    def create_parser(self, options: ParserOptions, tail: str) -> Parser:
        """For one answer; `tail`: the end of its prompt."""
        new_id = short_call_id if self.tool_parser == "mistral" else call_id
        if self.reasoning_parser == HARMONY and not options.only_calls and not options.has_grammar:
            return Parser(harmony.Messages(), options.tools if self.tool_parser else Tools(), new_id)
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
        return Parser(stage, options.tools, new_id)

    def collect_markers(self) -> str:
        """All that its formats are made of: special tokens that are in it must be seen."""
        parts: list[str] = list(harmony.MARKERS) if HARMONY in (self.tool_parser, self.reasoning_parser) else []
        if (thinking := self.reasoning_format) is not None:
            parts += [thinking.start, thinking.end]
        match self.tool_format:
            case JsonFormat(markers=markers, head=head, tail=tail):
                parts += [*markers, head, tail]
            case ParameterFormat(markers=markers, head=head, parameter=parameter, value_end=end, tail=tail):
                parts += [*markers, head, parameter, end, tail]
            case PythonicFormat(markers=markers):
                parts += [*markers, "<|python_end|>"]
        return "\0".join(parts).replace("\\", "")


def select_parsers(tool_call_parser: str, reasoning_parser: str, templates: Sequence[str]) -> tuple[ModelParsers, str]:
    """(parsers for a model with these chat templates, why these, in words). Raises ValueError for two that do not go together."""
    text = "\0".join(templates)
    calls = _detect(text, _CALL_SIGNS) if tool_call_parser == "auto" else tool_call_parser
    thinking = _detect(text, _REASONING_SIGNS) if reasoning_parser == "auto" else reasoning_parser
    if calls == HARMONY != thinking:  # one format for both
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
    """Harmony for calls and reasoning, unless a flag says otherwise: then it is for neither."""
    if HARMONY in (tool_call_parser, reasoning_parser) and {tool_call_parser, reasoning_parser} - {"auto", HARMONY}:
        flags = f"--tool-call-parser {tool_call_parser} and --reasoning-parser {reasoning_parser}"
        raise ValueError(f"{flags} do not go together: harmony is for both")
    if reasoning_parser not in ("auto", HARMONY):
        return "none", reasoning_parser
    if tool_call_parser not in ("auto", HARMONY):
        return tool_call_parser, "none"
    return calls, thinking


def _detect(text: str, signs: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    return next((name for name, parts in signs if all(part in text for part in parts)), "none")
