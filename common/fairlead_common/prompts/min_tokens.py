"""A lower bound of a text's tokens without tokenizing it: a text that is certainly too long is refused in milliseconds.

Counted are ASCII letters and digits, since nothing that tokenizers do to a text loses one: normalizers drop whitespace, controls and
accents, pre-tokenizers whitespace, and an added token with `lstrip` or `rstrip` takes any amount of it. Each such character is in the end
part of a token, and a token has only so many of them: the most that any has in this vocabulary. (Blanks and rules are not counted:
vocabularies have tokens of a hundred blanks or dashes, beside which the longest word is short.) Two things are allowed for:

- NFC and NFKC make one character of a letter and the accents after it, so each character beyond ASCII is taken for the end of a letter;
- a model that has no token for a letter of its own drops it, or makes one unknown token of many: then nothing is told. So it is with models
  that give whole words up (WordPiece, WordLevel), and with normalizers and pre-tokenizers of which the above is not known.
"""

import string
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

COUNTED: Final = (string.ascii_letters + string.digits).encode()
_OTHERS: Final = bytes(set(range(256)) - set(COUNTED))
_NOT_BEGINNING: Final = bytes(range(0xC0))
"""All but the first bytes of characters beyond ASCII, in UTF-8."""
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
    """Of `tokenizer.json`, what is asked here: a vocabulary of megabytes is passed over."""

    model: _Model
    normalizer: _Part | None = None
    pre_tokenizer: _Part | None = None


class MinTokenCounter:
    """Lower bounds for one tokenizer. `max_characters`: the most letters and digits in one token; 0: no bound is known."""

    def __init__(self, tokenizer_json: str, tokenizer: Tokenizer) -> None:
        self.max_characters = _longest(tokenizer) if _keeps(tokenizer_json, tokenizer) else 0

    def count(self, text: str) -> int:
        """Return a lower bound of the text's tokens; 0 if none is known."""
        if not self.max_characters:
            return 0
        raw = text.encode(errors="replace")
        sure = len(raw.translate(None, _OTHERS)) - len(raw.translate(None, _NOT_BEGINNING))
        return max(0, -(-sure // self.max_characters))


def _longest(tokenizer: Tokenizer) -> int:
    texts = list(tokenizer.get_vocab(with_added_tokens=True))
    if tokenizer.normalizer is not None:  # added tokens may be looked for in normalized text
        texts += [tokenizer.normalizer.normalize_str(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
    return max(map(_count, texts), default=0)


def _keeps(tokenizer_json: str, tokenizer: Tokenizer) -> bool:
    """Return whether each letter and digit of a text becomes part of a token."""
    settings = msgspec.json.decode(tokenizer_json, type=_Settings)
    model = settings.model
    if model.type not in ("BPE", "Unigram") or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    known = tokenizer.get_vocab(with_added_tokens=False)
    if not all(chr(one) in known for one in COUNTED):
        return False
    normalizers, splitters = _parts(settings.normalizer, "normalizers"), _parts(settings.pre_tokenizer, "pretokenizers")
    return all(map(_normalizer_keeps, normalizers)) and all(map(_splitter_keeps, splitters))


def _parts(given: _Part | None, name: str) -> Iterator[_Part]:
    """One by one, what may be a sequence of others."""
    if given is not None and given["type"] == "Sequence":
        for part in given[name]:
            yield from _parts(part, name)
    elif given is not None:
        yield given


def _normalizer_keeps(part: _Part) -> bool:
    if part["type"] == "Replace":  # a regular expression may take anything
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
