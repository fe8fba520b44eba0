"""A lower bound of a text's tokens without tokenizing it: a text that is certainly too long is refused in milliseconds.

Only ASCII letters and digits are counted, because no step of a tokenizer loses one. Normalizers drop whitespace, controls and accents;
pre-tokenizers drop whitespace; an added token with `lstrip` or `rstrip` takes any amount of whitespace. So each counted character becomes
part of a token, and the bound is their number divided by the most that any token of this vocabulary has. Blanks and dashes are not counted:
vocabularies have tokens of a hundred of them, far longer than the longest word. There are two exceptions:

- NFC and NFKC merge a letter and the accents after it into one character. So each character beyond ASCII is subtracted as one letter.
- A model without a token for some letter drops this letter, or makes one unknown token of many. Then no bound is known. The same holds for
  models that drop whole words (WordPiece, WordLevel) and for normalizers and pre-tokenizers that are not listed here.
"""

import string
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

COUNTED: Final = (string.ascii_letters + string.digits).encode()
_OTHERS: Final = bytes(set(range(256)) - set(COUNTED))
_NOT_BEGINNING: Final = bytes(range(0xC0))
"""All bytes except the first bytes of characters beyond ASCII, in UTF-8."""
_KEEPING_NORMALIZERS: Final = frozenset(
    {"BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend", "Strip", "StripAccents"}
)
_KEEPING_SPLITTERS: Final = frozenset(
    {
        "BertPreTokenizer",
        "ByteLevel",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    }
)
_Part = dict[str, Any]


class _Model(msgspec.Struct):
    type: str = ""
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _Settings(msgspec.Struct):
    """The parts of `tokenizer.json` that are read here; its vocabulary of megabytes is skipped."""

    model: _Model
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None


class MinTokenCounter:
    """Lower bounds for one tokenizer. `max_characters`: the most letters and digits in one token; 0: no bound is known."""

    def __init__(self, tokenizer_json: str, tokenizer: Tokenizer) -> None:
        self.max_characters = _max_characters(tokenizer) if _keeps_characters(tokenizer_json, tokenizer) else 0

    def count(self, text: str) -> int:
        """Return a lower bound of the text's tokens; 0 if none is known."""
        if not self.max_characters:
            return 0
        raw = text.encode(errors="replace")
        sure = len(raw.translate(None, _OTHERS)) - len(raw.translate(None, _NOT_BEGINNING))
        return max(0, -(-sure // self.max_characters))


def _max_characters(tokenizer: Tokenizer) -> int:
    texts = list(tokenizer.get_vocab(with_added_tokens=True))
    if tokenizer.normalizer is not None:  # added tokens may be matched in normalized text
        texts += [tokenizer.normalizer.normalize_str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
    return max(map(_count, texts), default=0)


def _keeps_characters(tokenizer_json: str, tokenizer: Tokenizer) -> bool:
    """Return whether each letter and digit of a text becomes part of a token."""
    settings = msgspec.json.decode(tokenizer_json, type=_Settings)
    model = settings.model
    if model.type not in ("BPE", "Unigram") or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    known = tokenizer.get_vocab(with_added_tokens=False)
    if not all(chr(one) in known for one in COUNTED):
        return False
    normalizers, splitters = _flatten(settings.normalizer, "normalizers"), _flatten(settings.pre_tokenizer, "pretokenizers")
    return all(map(_normalizer_keeps, normalizers)) and all(map(_splitter_keeps, splitters))


def _flatten(given: _Part | None, name: str) -> Iterator[_Part]:
    """Yield the parts of a component, which may be a sequence of others."""
    if given is not None and given["type"] == "Sequence":
        for part in given[name]:
            yield from _flatten(part, name)
    elif given is not None:
        yield given


def _normalizer_keeps(part: _Part) -> bool:
    if part["type"] == "Replace":  # a regular expression may remove anything
        return "String" in part["pattern"] and not _count(part["pattern"]["String"])
    return part["type"] in _KEEPING_NORMALIZERS


def _splitter_keeps(part: _Part) -> bool:
    match part["type"]:
        case "Split":
            return bool(part["behavior"] != "Removed")
        case "CharDelimiterSplit":
            return not _count(part["delimiter"])
        case kind:
            return kind in _KEEPING_SPLITTERS


def _count(text: str) -> int:
    return len(text.encode(errors="replace").translate(None, _OTHERS))
