"""Incremental detokenization: text that was returned never changes later."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

_CONTEXT = 6
"""Prompt tokens that determine the completion's first space. A byte-level character has at most four tokens."""
_REPLACEMENT = "\ufffd"
_MAX_PENDING = 64
"""Longest wait for a complete character, in tokens. Each waiting token decodes all of them again, and a character has at most four."""


class Decode(Protocol):
    def __call__(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Decodes a growing list of tokens.

    A token's text depends on the token before it, and a character may have several tokens. So a small window is decoded twice, with and
    without the new tokens. The difference is the new text (as in text-generation-inference and vLLM).
    """

    def __init__(
        self, decode: Decode, prompt: Sequence[int] = (), skip_special_tokens: bool = True, token_texts: dict[int, str] | None = None
    ) -> None:
        """`token_texts`: a cache of the texts of single tokens, for all streams with the same `decode` and `skip_special_tokens`."""
        self._decode: Callable[[Sequence[int]], str] = partial(decode, skip_special_tokens=skip_special_tokens)
        self._token_texts = {} if token_texts is None else token_texts
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0  # first token of the window
        self._read = len(self._tokens)  # the text of the tokens before it was returned

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens and return the text that they complete; empty while a character is incomplete."""
        self._tokens.extend(tokens)
        known = self._known()
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith(_REPLACEMENT):
            if len(self._tokens) - self._read < _MAX_PENDING:
                return ""
            if text == known:  # most likely special tokens: drop them
                del self._tokens[self._read :]
                return ""
        return self._advance(text[len(known) :])

    def finish(self) -> str:
        """End the stream and return the remaining text, with incomplete characters as U+FFFD."""
        known = self._known()
        return self._advance(self._decode(self._tokens[self._start :])[len(known) :])

    def _known(self) -> str:
        """Return the window's text without new tokens. It is usually one token, whose text is the same in all streams."""
        if self._read - self._start != 1:
            return self._decode(self._tokens[self._start : self._read])
        token = self._tokens[self._start]
        text = self._token_texts.get(token)
        if text is None:
            text = self._token_texts[token] = self._decode([token])
        return text

    def _advance(self, text: str) -> str:
        self._start = self._read
        self._read = len(self._tokens)
        if self._start > 256:  # drop tokens before the window
            del self._tokens[: self._start]
            self._read -= self._start
            self._start = 0
        return text
