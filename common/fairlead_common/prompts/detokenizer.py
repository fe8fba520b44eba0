"""Token ids that arrive one by one, as text that never takes back what it gave."""

from collections.abc import Callable, Sequence
from typing import Protocol

_CONTEXT = 6  # tokens before the completion that decide its first space; byte-level characters take at most four
_BROKEN = "\ufffd"
_PATIENCE = 64
"""Tokens without text after which none is waited for: each costs a decoding of all of them, and a character takes no more than four."""


class Decode(Protocol):
    def __call__(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class TextStream:
    """Decodes a growing list of tokens.

    A token's text depends on the token before it, and a character may take several tokens: so a small window is decoded twice, with and
    without the new tokens, and the difference is the new text (the scheme of text-generation-inference and vLLM).
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda tokens: decode(tokens, skip_special_tokens=skip_special_tokens)
        self._tokens = list(prompt[-_CONTEXT:])
        self._start = 0  # of the window
        self._read = len(self._tokens)  # tokens before it were given out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; empty while a character is incomplete."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if len(text) <= len(known) or text.endswith(_BROKEN):
            if len(self._tokens) - self._read < _PATIENCE:
                return ""
            if text == known:  # special tokens, most likely: as if they had not come
                del self._tokens[self._read :]
                return ""
        return self._advance(text[len(known) :])

    def finish(self) -> str:
        """What is left, incomplete characters as U+FFFD. The stream is over."""
        known = self._decode(self._tokens[self._start : self._read])
        return self._advance(self._decode(self._tokens[self._start :])[len(known) :])

    def _advance(self, text: str) -> str:
        self._start = self._read
        self._read = len(self._tokens)
        if self._start > 256:  # keep the window, not the completion
            del self._tokens[: self._start]
            self._read -= self._start
            self._start = 0
        return text
