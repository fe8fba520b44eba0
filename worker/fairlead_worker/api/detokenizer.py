"""Token ids to text, a few at a time, never half a character."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
PROMPT_TAIL = 6
"""Prompt tokens decoded in front of the output: some decoders strip the space before the first word of a text, and a
continuation is not the first word. Six span the pieces of any one character."""


class Detokenizer:
    """Incremental decoding of one sequence.

    Text that ends in U+FFFD may be the beginning of a character whose other bytes come with the next token, so it is held back
    until text that ends otherwise, or the end. (The prefix and read offsets of text-generation-inference.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_tail)[-PROMPT_TAIL:]
        """The tokens of the last text given out, and those that came since: enough context for the next token's spacing."""
        self._given = len(self._window)
        """How many of `_window` were given out."""
        # A prompt of token ids may end within a character: the output then completes it.
        self._known = self._decode(self._window).rstrip(REPLACEMENT)
        """The text of `_window` that was given out."""

    def feed(self, tokens: Iterable[int]) -> str:
        """The text that became certain with `tokens`."""
        pieces = []
        for token in tokens:
            self._window.append(token)
            text = self._decode(self._window)
            if len(text) > len(self._known) and not text.endswith(REPLACEMENT):
                pieces.append(text[len(self._known) :])
                # The window begins where an earlier text ended: between characters, never within one.
                del self._window[: self._given]
                self._given = len(self._window)
                self._known = self._decode(self._window)
        return "".join(pieces)

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        text = self._decode(self._window)
        rest, self._known = text[len(self._known) :], text
        return rest

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """One token by itself, as logprobs show it; special tokens by their names."""
    return tokenizer.decode([token], skip_special_tokens=False)


_BYTE_OF = {
    # The GPT-2 alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
    char: byte
    for printable in [[*range(33, 127), *range(161, 173), *range(174, 256)]]
    for byte, char in [(b, chr(b)) for b in printable] + [(b, chr(256 + n)) for n, b in enumerate(b for b in range(256) if b not in printable)]
}


def token_bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    """The bytes that a token stands for, also where they are only a part of a character."""
    text = token_text(tokenizer, token)
    if REPLACEMENT not in text:
        return list(text.encode())
    piece = tokenizer.id_to_token(token) or ""
    if len(piece) == 6 and piece.startswith("<0x"):
        return [int(piece[3:5], 16)]
    if piece and all(char in _BYTE_OF for char in piece):
        return [_BYTE_OF[char] for char in piece]
    return list(text.encode())
