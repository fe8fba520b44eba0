"""Texts and bytes of single tokens, for log-probabilities.

A token that is decoded alone loses what depends on its place: decoders of SentencePiece tokenizers strip the first space of a text.
"""

from functools import cached_property

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}
"""GPT-2's byte alphabet: printable Latin-1 bytes map to themselves, the other bytes to U+0100 and up."""


class TokenTexts:
    """The tokens of one tokenizer. Each is decoded once, so the memory is bounded by the vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._texts: dict[int, str] = {}

    def inside(self, token: int) -> str:
        """Return a token's text inside a text. A special token gives its name, a part of a character U+FFFD."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._decode([token]) if token in self._special else self._decode_inside(token)
        return text

    def special_name(self, token: int) -> str:
        """Return the name of a special token, empty for any other token."""
        return self.inside(token) if token in self._special else ""

    def name_of(self, token: int) -> str:
        """Return a token's text inside a text, or for a part of a character its bytes, as OpenAI writes them: `bytes:\\xe2\\x80`."""
        text = self.inside(token)
        return text if _REPLACEMENT not in text else "bytes:" + "".join([f"\\x{byte:02x}" for byte in self.bytes_of(token)])

    def bytes_of(self, token: int, text: str | None = None) -> bytes:
        """Return the bytes of a token. `text`: what it adds at its place. A part of a character has the bytes of the vocabulary."""
        whole = self.inside(token)
        if _REPLACEMENT not in whole:
            if text is None or (token in self._special and not text) or _REPLACEMENT in text:
                text = whole
            return text.encode()
        written = self._tokenizer.id_to_token(token) or ""
        if len(written) == 6 and written.startswith("<0x"):  # SentencePiece's byte fallback
            return bytes([int(written[3:5], 16)])
        if written and all(char in _BYTE_OF for char in written):
            return bytes([_BYTE_OF[char] for char in written])
        return whole.encode()

    def _decode_inside(self, token: int) -> str:
        anchor, before = self._anchor
        text = self._decode([anchor, token])
        return text[len(before) :] if text.startswith(before) else self._decode([token])

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    @cached_property
    def _anchor(self) -> tuple[int, str]:
        """A token that starts a text, and its text."""
        (*_, anchor) = self._tokenizer.encode("a", add_special_tokens=False).ids or [0]
        return anchor, self._decode([anchor])
