"""Loader of a draft model. It must share the target model's tokenizer."""

import json
from pathlib import Path

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.tokenizer_files import convert_tokenizer


def load_draft(
    uri: str,
    target: LoadedModel,
    *,
    dtype: str = "auto",
    quantization: str = "none",
    progress: Progress = no_progress,
    cache: ModelCache | None = None,
) -> LoadedModel:
    """Load the model at `uri` to draft for `target`.

    Raises ModelLoadError as for any model, or if the two do not fit together.
    """
    draft = load_model(uri, dtype=dtype, device=target.device, quantization=quantization, progress=progress, cache=cache)
    if draft.states:
        raise ModelLoadError(uri, "it has recurrent layers, whose states cannot go back behind a rejected token: choose another one")
    if draft.max_model_len < target.max_model_len:
        raise ModelLoadError(
            uri,
            f"it supports at most {draft.max_model_len} tokens, and the target model {target.max_model_len}; "
            f"set --max-model-len {draft.max_model_len} or choose another model in --speculative-config",
        )
    known, wanted = _vocabulary(uri, draft.path), _vocabulary(uri, target.path)
    different = sorted(number for number in known.keys() & wanted.keys() if known[number] != wanted[number])
    if different or not known.keys() & wanted.keys():
        example = (
            f"token {different[0]} is {known[different[0]]!r} there and {wanted[different[0]]!r} here"
            if different
            else "no token is in both"
        )
        raise ModelLoadError(
            uri,
            f"it cannot draft for {target.path.name}: their tokenizers differ ({example}); "
            "choose a model of the same family in --speculative-config",
        )
    return draft


def _vocabulary(uri: str, folder: Path) -> dict[int, str]:
    """Return token id -> token, from tokenizer.json or what it is made of."""
    path = folder / "tokenizer.json"
    try:
        converted = convert_tokenizer(folder)
        raw = json.loads(converted.backend_tokenizer.to_str() if converted else path.read_text(encoding="utf-8"))
        vocabulary = raw["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens = {number: token for token, number in vocabulary.items()}
        else:  # a unigram model: pairs of token and score, in order
            tokens = {number: pair[0] for number, pair in enumerate(vocabulary)}
        return tokens | {added["id"]: added["content"] for added in raw.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(uri, f"its tokenizer cannot be compared with the target's, because {path} cannot be read: {error}") from error
