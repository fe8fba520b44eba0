"""`bad_words`: words as clients write them, made into the token sequences that the engine keeps out."""

from collections.abc import Sequence

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid


def token_sequences(encoder: PromptEncoder, words: Sequence[str], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Of each word as it is at the beginning of a text and, where that is another token, after a space: vLLM's rule.

    A sequence with a token that the model has no row for (of `vocabulary` rows) cannot come, and is left out. Raises ApiError 400.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise invalid("bad_words: a word of spaces alone would forbid most texts; leave it out", param="bad_words")
        plain = tuple(encoder.encode_text(bare, add_special_tokens=False))
        spaced = tuple(encoder.encode_text(f" {bare}", add_special_tokens=False))
        found[plain] = None
        if spaced[:1] != plain[:1] and len(spaced) == len(plain):
            found[spaced] = None
    return tuple(sequence for sequence in found if sequence and max(sequence) < vocabulary)
