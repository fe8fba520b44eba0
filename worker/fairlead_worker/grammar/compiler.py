"""All use of llguidance: tokenizers, matchers and masks.

A grammar becomes an Earley parser over a lexer of regex derivatives that is built lazily. Compiling only parses the grammar, and each mask
pays for the states that it reaches (https://github.com/guidance-ai/llguidance). Building a matcher and filling a mask release Python's
lock.
"""

import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Matcher = LLMatcher

MAX_LEXER_STATES = 50_000
"""Lexer states of one grammar. Each takes 1 to 2 KB. The library's other limits keep their defaults."""
NO_EXTENSION_ERROR, ENDLESS_MESSAGE = "NoExtensionBias", "it matches no text: one of its rules refers to itself endlessly"
"""The library's error for a grammar that allows no first token, and its meaning."""


class GrammarError(ValueError):
    """The grammar cannot be compiled. The message has the reason."""


class Compiler:
    """Compiles grammars for one tokenizer. Its methods may be called from any thread."""

    def __init__(self, tokenizer_json: str, vocabulary: int, eos: Sequence[int]) -> None:
        """`vocabulary`: number of tokens with a logit. `eos`: tokens that end an answer.

        Raise GrammarError for a tokenizer that llguidance cannot read. It takes a second for 32,000 tokens and holds Python's lock.
        """
        try:
            self._tokenizer = _read_tokenizer(tokenizer_json, vocabulary, list(eos))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise GrammarError(f"this model's tokenizer does not work with grammars: {error}") from error
        self.eos = tuple(self._tokenizer.eos_tokens)
        self.words = -(-self._tokenizer.vocab_size // 32)
        """32-bit words of a mask."""

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the start of `grammar`, in llguidance's own text form. Raise GrammarError."""
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        )
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))
        return matcher

    def fill(self, matcher: Matcher, mask: np.ndarray) -> None:
        """Fill mask [words] uint32 with a bit for each token that may come next. Raise GrammarError if a limit was reached."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))

    def special(self, text: str) -> int | None:
        """Return the id of the special token `text`, which ordinary text cannot produce, or None if it is ordinary text."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]) else None


_LEADING_SPACE = re.compile(r'\{"type":"Replace","pattern":\{"Regex":"\\\\A(?:[^"\\]|\\.)*"\},"content":"▁"\},')
"""The normalizer of SentencePiece vocabularies with symbols of the user (`weights/tokenizer_files.py`)."""


def _read_tokenizer(tokenizer_json: str, vocabulary: int, eos: list[int]) -> LLTokenizer:
    """Read a tokenizer with as many tokens as the model has logits, or with all of its own tokens if it has more.

    The text that a grammar forces follows other text, so nothing is put before it. The library leaves out `Prepend` by itself.
    """
    tokenizer_json = _LEADING_SPACE.sub("", tokenizer_json, count=1)
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=eos or None)
    except ValueError:
        return LLTokenizer(tokenizer_json, eos_token=eos or None)


def describe_error(matcher: Matcher) -> str:
    """Return the matcher's error on one line, short enough for a response."""
    lines = [line.strip() for line in str(matcher.get_error()).replace("<non-verbose/>", "").splitlines() if line.strip()]
    return ENDLESS_MESSAGE if lines == [NO_EXTENSION_ERROR] else " ".join(lines)[:400]
