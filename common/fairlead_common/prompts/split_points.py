"""Split points of a text, whose parts tokenize to the same tokens as the whole, and the tokens that a tokenizer puts around every text.

A tokenizer first takes its added tokens (`<|im_start|>`, `</s>`, ...) out of a text. Each piece between them is normalized, pre-tokenized
and encoded on its own (tokenizers: added_vocabulary.rs, `extract_and_normalize`). So the text before an added token and the text that
starts with it are independent, whatever the model (BPE, Unigram, WordPiece), under three conditions:

- The token is matched in the raw text (`normalized` off), takes no whitespace on its left (`lstrip`), and is matched whatever its
  neighbours are (`single_word` off).
- No other added token can overlap its beginning: none contains it after the first character, and none ends with a prefix of it. Then each
  of its occurrences is a match, wherever the scan started.
- It begins with punctuation, because the token before it may take whitespace on its right (`rstrip`) or match only whole words.

The split is *before* the token. So the text after the token is never at offset 0, where Metaspace's prepend scheme `first` adds a space.
"""

import re
import string
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

MAX_TRIED, MAX_MARKS = 256, 64
"""Limits on the added tokens that are tried and used; those in `wanted` come first. More would slow every text down, and no template writes
so many."""
_PROBES: Final = ("a", " a", "a ", "\n", "  b\n\n c", "Ab 12", "é漢🙂", "a\u0301", "▁x", "'s")
_AFFIX_PROBES: Final = ("a", "Hello there", "7 + 8", "\n")
_FIXED_AFFIXES: Final = frozenset({"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing", "Sequence"})


class SplitPoints:
    """The split points of one tokenizer. `marks`: the added tokens before which a text may be split; if empty, texts stay whole."""

    def __init__(self, tokenizer: Tokenizer, wanted: Sequence[str] = ()) -> None:
        """`wanted`: texts whose added tokens are preferred as marks (chat templates, special tokens) if a tokenizer has very many."""
        self.marks = _find_marks(tokenizer, wanted)
        self._pattern = re.compile("|".join(map(re.escape, self.marks))) if self.marks else None

    def split(self, text: str) -> list[str]:
        """Split a text. Each part but the first begins with a mark; joined, the parts are the text."""
        if self._pattern is None:
            return [text]
        starts = [match.start() for match in self._pattern.finditer(text)]
        if not starts:
            return [text]
        if starts[0]:
            starts.insert(0, 0)
        starts.append(len(text))
        return [text[start:end] for start, end in pairwise(starts)]


def find_affixes(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the token ids that the post-processor puts before and after every text, or None if they may differ between texts."""
    processor = tokenizer.post_processor
    if processor is not None and not _has_fixed_affixes(msgspec.json.decode(processor.__getstate__())):
        return None
    bare = [encoding.ids for encoding in tokenizer.encode_batch_fast(_AFFIX_PROBES, add_special_tokens=False)]
    whole = [encoding.ids for encoding in tokenizer.encode_batch_fast(_AFFIX_PROBES, add_special_tokens=True)]
    pairs = list(zip(bare, whole, strict=True))
    most = min(len(long) - len(short) for short, long in pairs)
    places = [at for at in range(most + 1) if all(long[at : at + len(short)] == short for short, long in pairs)]
    found = {(tuple(long[:at]), tuple(long[at + len(short) :])) for at in places for short, long in pairs}
    if len(found) != 1:
        return None
    ((before, after),) = found
    return list(before), list(after)


def _find_marks(tokenizer: Tokenizer, wanted: Sequence[str]) -> list[str]:
    if getattr(tokenizer.model, "dropout", None):
        return []  # random by design
    raw = [token for token in tokenizer.get_added_tokens_decoder().values() if token.content and not token.normalized]
    contents = {token.content for token in raw}
    awkward = tuple(token.content for token in raw if token.lstrip or token.single_word)
    text = "\0".join(wanted)
    fit = [content for content in contents if content[0] in string.punctuation]
    tried = sorted(fit, key=lambda content: (content not in text, content))[:MAX_TRIED]
    covered = _find_overlapped(tried, contents)
    marks = [mark for mark in tried if mark not in covered and not any(token.startswith(mark) for token in awkward)]
    return [mark for mark in marks[:MAX_MARKS] if _verify_mark(tokenizer, mark)]


def _find_overlapped(tried: Sequence[str], contents: Collection[str]) -> set[str]:
    """Return the tokens of `tried` whose beginning a token of `contents` can overlap, by containing it or by ending with a prefix of it."""
    insides = "\0".join(content[1:] for content in contents)
    covered = {mark for mark in tried if mark in insides}
    beginning: dict[str, list[str]] = {}
    for mark in tried:
        for end in range(1, len(mark) + 1):
            beginning.setdefault(mark[:end], []).append(mark)
    for content in contents:
        for at in range(1, len(content)):
            if found := beginning.get(content[at:]):
                covered.update(found)
    return covered


def _verify_mark(tokenizer: Tokenizer, mark: str) -> bool:
    """Test the conditions above on this tokenizer. If the library ever behaves differently, the cache is lost but the tokens stay right."""
    pairs = [(left, right) for left in ("", *_PROBES) for right in ("", *_PROBES)]
    whole = tokenizer.encode_batch_fast([left + mark + right for left, right in pairs], add_special_tokens=False)
    lefts = {left: tokenizer.encode(left, add_special_tokens=False).ids for left in ("", *_PROBES)}
    rights = {right: tokenizer.encode(mark + right, add_special_tokens=False).ids for right in ("", *_PROBES)}
    return all(lefts[left] + rights[right] == encoding.ids for (left, right), encoding in zip(pairs, whole, strict=True))


def _has_fixed_affixes(processor: dict[str, Any]) -> bool:
    """Return whether a post-processor adds the same tokens to every text."""
    return processor["type"] in _FIXED_AFFIXES and all(_has_fixed_affixes(part) for part in processor.get("processors", ()))
