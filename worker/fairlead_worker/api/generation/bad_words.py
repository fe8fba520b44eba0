"""`bad_words`: convert words of a request to the token sequences that the engine must not generate."""

from collections.abc import Sequence

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.errors import invalid


def token_sequences(encoder: PromptEncoder, words: Sequence[str], vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens at the start of a text and, if those differ, after a space. This is vLLM's rule.

    Omit sequences with a token at or above `vocabulary`, the number of the model's logits: they cannot be generated. Raise ApiError 400.
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
