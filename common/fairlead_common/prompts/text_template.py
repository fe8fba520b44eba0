"""A tokenizer's template of special tokens around one text or a pair, for texts that are cut: special tokens are not."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """The special tokens of a template."""

    before: "array[int]"
    between: "array[int]"
    """Before the second text; empty for one text."""
    after: "array[int]"
    has_types: bool
    """Whether the second text's tokens have the type 1."""

    @classmethod
    def probe(cls, tokenizer: Tokenizer, texts: int) -> "TextTemplate":
        """Read the template for one text or two from the tokens of short ones."""
        joined, length = tokenizer.encode("a", "a" if texts > 1 else None), len(tokenizer.encode("a", add_special_tokens=False))
        ids = array("I", joined.ids)
        places = [place for place, is_special in enumerate(joined.special_tokens_mask) if not is_special]
        begin, end, last_end = places[0], places[length - 1] + 1, places[-1] + 1
        last_begin = places[length] if texts > 1 else end
        return cls(ids[:begin], ids[end:last_begin], ids[last_end:], joined.type_ids[last_end - 1] == 1)

    def join(self, texts: "Sequence[array[int]]", limit: int | None = None, keeps_end: bool = False) -> "tuple[array[int], int]":
        """Return the tokens of the texts in the template, and where those of type 1 begin (0: there are none).

        limit: tokens of the whole; longer texts are cut at their end, or at their beginning (keeps_end).
        """
        if limit is not None:
            room = max(0, limit - len(self.before) - len(self.between) - len(self.after))
            lengths = divide_room(room, [len(text) for text in texts])
            texts = [text[len(text) - kept :] if keeps_end else text[:kept] for text, kept in zip(texts, lengths, strict=True)]
        tokens = self.before + texts[0]
        second = 0
        if len(texts) > 1:
            tokens += self.between
            second = len(tokens) if self.has_types else 0
            tokens += texts[1]
        return tokens + self.after, second


def divide_room(room: int, lengths: Sequence[int]) -> list[int]:
    """Return the tokens that each text keeps of `room`, as longest_first of transformers: the longer one is cut, then both to half."""
    if len(lengths) == 1 or sum(lengths) <= room:
        return [min(length, room) for length in lengths]
    short = min(*lengths, room // 2)
    return [short, room - short] if lengths[0] <= lengths[1] else [room - short, short]
