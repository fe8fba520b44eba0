"""Which parsers read a model's answers: named by flags, or told from its chat template, which shows how the model was taught to call."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlead_worker.parsing import harmony
from fairlead_worker.parsing.json_calls import FORCED, JSON_CALLS, Content, Given, JsonFormat
from fairlead_worker.parsing.parameter_calls import PARAMETER_CALLS, ParameterFormat
from fairlead_worker.parsing.pythonic import PythonicFormat
from fairlead_worker.parsing.stage import Parser, Plain, Stage, Tools, call_id, short_call_id
from fairlead_worker.parsing.thinking import THINKING, Thinking, ThinkingFormat

CallFormat = JsonFormat | ParameterFormat | PythonicFormat
CALLS: dict[str, CallFormat] = {**JSON_CALLS, **PARAMETER_CALLS, "pythonic": PythonicFormat()}
HARMONY = "harmony"
TOOL_CALL_PARSERS = ("auto", "none", HARMONY, *CALLS)
REASONING_PARSERS = ("auto", "none", HARMONY, *THINKING)
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
_THINKING_SIGNS: Sequence[tuple[str, tuple[str, ...]]] = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("granite", ("Here is my thought process:",)),
    ("think", ("</think>",)),
    ("think", ("<think>",)),
)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request wants read out of its answer."""

    tools: Tools = field(default_factory=Tools)
    """Those that may be called; none: nothing is taken for a call."""
    forced: bool = False
    """A grammar makes the answer nothing but calls: `FORCED`'s list, or the arguments of `named`."""
    named: str = ""
    constrained: bool = False
    """A grammar makes the answer, after the reasoning."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The parsers of one model; empty names: there is none."""

    calls: str = ""
    thinking: str = ""

    @property
    def format(self) -> CallFormat | None:
        return CALLS.get(self.calls)

    @property
    def thinking_format(self) -> ThinkingFormat | None:
        """What a grammar has to let pass before the answer."""
        return harmony.THINKING if self.thinking == HARMONY else THINKING.get(self.thinking)

    def reads(self, wish: Wish) -> bool:
        """Whether anything is to be told from text: if not, an answer needs no parser."""
        return bool(self.thinking) or wish.forced or (bool(self.calls) and bool(wish.tools.schemas))

    def opened(self, tail: str) -> bool:
        """Whether a prompt ends within reasoning: its template has written the start marker."""
        format = self.thinking_format
        if format is None:
            return False
        tail = tail.rstrip()
        return tail.endswith(format.start) or (format.always and not tail.endswith(format.end))

    def closed(self, tail: str) -> bool:
        """Whether a prompt ends behind reasoning: its template leaves none to do."""
        format = self.thinking_format
        return format is not None and tail.rstrip().endswith(format.end)

    def parser(self, wish: Wish, tail: str) -> Parser:
        """For one answer; `tail`: the end of its prompt."""
        new_id = short_call_id if self.calls == "mistral" else call_id
        if self.thinking == HARMONY and not wish.forced and not wish.constrained:
            return Parser(harmony.Messages(), wish.tools if self.calls else Tools(), new_id)
        stage: Stage = Plain()
        if wish.named:
            stage = Given(wish.named)
        elif wish.forced:
            stage = Content(FORCED)
        elif wish.tools.schemas and self.format is not None:
            stage = Content(self.format)
        format = self.thinking_format
        if format is not None:
            stage = Thinking(format, self.opened(tail), stage)
        return Parser(stage, wish.tools, new_id)

    def markup(self) -> str:
        """All that its formats are made of: special tokens that are in it must be seen."""
        parts: list[str] = list(harmony.MARKERS) if HARMONY in (self.calls, self.thinking) else []
        if (thinking := self.thinking_format) is not None:
            parts += [thinking.start, thinking.end]
        match self.format:
            case JsonFormat(markers=markers, head=head, tail=tail):
                parts += [*markers, head, tail]
            case ParameterFormat(markers=markers, head=head, parameter=parameter, value_end=end, tail=tail):
                parts += [*markers, head, parameter, end, tail]
            case PythonicFormat(markers=markers):
                parts += [*markers, "<|python_end|>"]
        return "\0".join(parts).replace("\\", "")


def choose(tool_call_parser: str, reasoning_parser: str, templates: Sequence[str]) -> tuple[Reader, str]:
    """(parsers for a model with these chat templates, why these, in words). Raises ValueError for two that do not go together."""
    text = "\0".join(templates)
    calls = _told(text, _CALL_SIGNS) if tool_call_parser == "auto" else tool_call_parser
    thinking = _told(text, _THINKING_SIGNS) if reasoning_parser == "auto" else reasoning_parser
    if calls == HARMONY != thinking:  # one format for both
        calls, thinking = _together(calls, HARMONY, tool_call_parser, reasoning_parser)
    elif thinking == HARMONY and calls not in (HARMONY, "none"):
        calls, thinking = _together(HARMONY, thinking, tool_call_parser, reasoning_parser)
    reader = Reader("" if calls == "none" else calls, "" if thinking == "none" else thinking)
    shown = ", ".join(
        f"{name}: {value or 'none'} ({'from the chat template' if flag == 'auto' else 'as the flag says'})"
        for name, value, flag in (("tool calls", reader.calls, tool_call_parser), ("reasoning", reader.thinking, reasoning_parser))
    )
    return reader, shown


def _together(calls: str, thinking: str, tool_call_parser: str, reasoning_parser: str) -> tuple[str, str]:
    """Harmony for calls and reasoning, unless a flag says otherwise: then it is for neither."""
    if HARMONY in (tool_call_parser, reasoning_parser) and {tool_call_parser, reasoning_parser} - {"auto", HARMONY}:
        flags = f"--tool-call-parser {tool_call_parser} and --reasoning-parser {reasoning_parser}"
        raise ValueError(f"{flags} do not go together: harmony is for both")
    if reasoning_parser not in ("auto", HARMONY):
        return "none", reasoning_parser
    if tool_call_parser not in ("auto", HARMONY):
        return tool_call_parser, "none"
    return calls, thinking


def _told(text: str, signs: Sequence[tuple[str, tuple[str, ...]]]) -> str:
    return next((name for name, parts in signs if all(part in text for part in parts)), "none")
