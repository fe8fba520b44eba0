"""`bad_words`: convert words of a request to the token sequences that the engine must not generate."""

from collections.abc import Sequence

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid


def find_token_sequences(encoder: PromptEncoder, words: Sequence[str], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens at the start of a text and, if those differ, after a space. This is vLLM's rule.

    Omit sequences with a token at or above `vocabulary`, the number of the model's logits: they cannot be generated. Raise ApiError 400.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise invalid("bad_words: a word of spaces alone would forbid most texts; leave it out", param="bad_words")
        plain = tuple(encoder.encode_text(bare, add_special_tokens=False))
        after_space = tuple(encoder.encode_text(f" {bare}", add_special_tokens=False))
        sequences[plain] = None
        if after_space[:1] != plain[:1] and len(after_space) == len(plain):
            sequences[after_space] = None
    return tuple(sequence for sequence in sequences if sequence and max(sequence) < vocabulary)
