"""llguidance, and all that is known of it here: tokenizers, matchers, masks.

A grammar becomes an Earley parser over a lexer of regex derivatives, built lazily: compiling is parsing the grammar, and masks pay for the
states that they meet (https://github.com/guidance-ai/llguidance). Building a matcher and filling a mask leave Python's lock alone.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Matcher = LLMatcher

MAX_LEXER_STATES = 50_000
"""Of one grammar: each takes 1 to 2 KB. The library's other bounds are as it sets them."""
NO_EXTENSION_ERROR, ENDLESS_MESSAGE = "NoExtensionBias", "it leads to no text: something in it refers to itself without an end"
"""What the library says of a grammar from whose beginning no token leads on, and what it means."""


class GrammarError(ValueError):
    """This grammar cannot be compiled; the message says why."""


class Compiler:
    """Grammars for one tokenizer. Its methods may be called from any thread."""

    def __init__(self, tokenizer_json: str, vocabulary: int, eos: Sequence[int]) -> None:
        """`vocabulary`: tokens that have a logit. `eos`: tokens that end an answer.

        GrammarError for a tokenizer that llguidance cannot read. Takes a second for 32,000 tokens, with Python's lock held.
        """
        try:
            self._tokenizer = _read_tokenizer(tokenizer_json, vocabulary, list(eos))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError(f"this model's tokenizer does not work with grammars: {error}") from error
        self.eos = tuple(self._tokenizer.eos_tokens)
        self.words = -(-self._tokenizer.vocab_size // 32)
        """Of 32 bits, in a mask."""

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of `grammar` (llguidance's own text form). Raises GrammarError."""
        matcher = LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        )
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))
        return matcher

    def fill(self, matcher: Matcher, mask: np.ndarray) -> None:
        """mask [words] uint32: a bit for each token that may come next. Raises GrammarError where a bound was met."""
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(describe_error(matcher))

    def special(self, text: str) -> int | None:
        """The id of the special token that `text` is, which no text matches; None where it is ordinary text."""
        tokens = self._tokenizer.tokenize_str(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 and self._tokenizer.is_special_token(tokens[0]) else None


def _read_tokenizer(tokenizer_json: str, vocabulary: int, eos: list[int]) -> LLTokenizer:
    """With as many tokens as the model has logits; with all of its own where it has more."""
    try:
        return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=eos or None)
    except ValueError:
        return LLTokenizer(tokenizer_json, eos_token=eos or None)


def describe_error(matcher: Matcher) -> str:
    """Its error on one line, cut to a length that an answer can carry."""
    lines = [line.strip() for line in str(matcher.get_error()).replace("<non-verbose/>", "").splitlines() if line.strip()]
    return ENDLESS_MESSAGE if lines == [NO_EXTENSION_ERROR] else " ".join(lines)[:400]
