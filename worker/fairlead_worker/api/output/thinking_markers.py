"""The tokens of a model's reasoning markers, with which the engine enforces thinking budgets."""

from array import array
from dataclasses import dataclass

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.parsing.families import ModelParsers
from fairlead_worker.parsing.registry import HARMONY

_CONTEXTS = (("", ""), ("a", "b"), (" a", " b"), (".", "\n"), ("\n", "\n\n"), ("1 ", "1"))
"""Texts around a marker. It must have the same tokens in each, or the engine would miss the model's own end marker."""
_BLANKS = (" ", "  ", "\n", "\n\n", "\n\n\n", " \n", "\t")


@dataclass(frozen=True, slots=True)
class ThinkingMarkers:
    """The reasoning markers as tokens."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    blank: tuple[int, ...]
    """Tokens of whitespace, which a model may write before the start marker."""

    def count_after_start(self, tail: "array[int]") -> int:
        """Return the number of tokens after the last start marker of a prompt's end; 0 without one, or if that reasoning has ended."""
        given, length = tuple(tail), len(self.start)
        found = next((at for at in range(len(given) - length, -1, -1) if given[at : at + length] == self.start), None)
        if found is None or any(given[at : at + len(self.end)] == self.end for at in range(found + length, len(given))):
            return 0
        return len(given) - found - length


def find_thinking_markers(parsers: ModelParsers, encoder: PromptEncoder) -> tuple[ThinkingMarkers | None, str]:
    """Return the markers' tokens, or None and the reason why budgets cannot be enforced."""
    format = parsers.reasoning_format
    if format is None:
        return None, "this model has no reasoning that the worker knows (--reasoning-parser)"
    if parsers.reasoning_parser == HARMONY:
        return None, "a budget is not enforced for gpt-oss, whose reasoning has several messages; lower reasoning_effort instead"
    start, end = _find_tokens(format.start, encoder), _find_tokens(format.end, encoder)
    if not start or not end:
        return None, f"this tokenizer has no tokens of their own for the markers {format.start!r} and {format.end!r} of its reasoning"
    blanks = (_encode(text, encoder) for text in _BLANKS)
    return ThinkingMarkers(start, end, tuple({tokens[0] for tokens in blanks if len(tokens) == 1})), ""


def _find_tokens(marker: str, encoder: PromptEncoder) -> tuple[int, ...]:
    """Return the tokens of a marker; empty if they depend on the text around it."""
    tokens = _encode(marker, encoder)
    around = ((_encode(before, encoder), _encode(before + marker + after, encoder)) for before, after in _CONTEXTS)
    return tokens if all(whole[len(first) : len(first) + len(tokens)] == tokens for first, whole in around) else ()


def _encode(text: str, encoder: PromptEncoder) -> tuple[int, ...]:
    return tuple(encoder.encode_text(text, add_special_tokens=False))
