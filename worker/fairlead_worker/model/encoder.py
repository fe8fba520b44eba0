"""Loads an encoder: an embedding model, or a classifier with its head."""

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.ipc.messages import Activation, Classifier, Pooling
from fairlead_worker.model.dtype import choose_dtype
from fairlead_worker.model.families.registry import FAMILIES, Encoder
from fairlead_worker.model.families.weights import MissingWeights, read_weights
from fairlead_worker.model.layers.texts import PackedTexts
from fairlead_worker.model.packed import pack_linears
from fairlead_worker.model.plan import check_weights
from fairlead_worker.model.pooling import read_json, read_pooling
from fairlead_worker.weights.digest import model_digest
from fairlead_worker.weights.progress import Progress, no_progress
from fairlead_worker.weights.tokenizer import load_tokenizer

HEADED = "ForSequenceClassification"
"""End of the architecture of a checkpoint with a classifier's head."""


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder ready to run, and its properties."""

    model: Encoder
    path: Path
    digest: str
    vocabulary_size: int
    max_model_len: int
    """Tokens of the longest text."""
    device: torch.device
    pooling: Pooling
    classifier: Classifier | None
    """None: the model makes embeddings."""
    has_types: bool
    """Whether the tokenizer tells the two texts of a pair apart."""


def is_encoder(folder: Path) -> bool:
    """Return whether `folder` has an encoder of FAMILIES."""
    config = read_json(folder / "config.json")
    return isinstance(config, dict) and config.get("model_type") in FAMILIES


@dataclass(frozen=True, slots=True)
class EncoderPlan:
    """What files and settings decide before any weight is read."""

    config: PreTrainedConfig
    classifier: Classifier | None
    dtype: torch.dtype
    files: list[str]


def plan_encoder(uri: str, folder: Path, *, dtype: str, device: torch.device) -> EncoderPlan:
    """Return how the encoder in `folder` is loaded; the arguments are those of `load_model`. Raises ModelLoadError."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(uri, f"config.json is not valid: {error}") from error
    if refused := FAMILIES[config.model_type].refuse(config):
        raise ModelLoadError(uri, f"unsupported architecture: {config.model_type} with {refused}")
    return EncoderPlan(config, _read_classifier(uri, config), choose_dtype(uri, dtype, config, device), check_weights(uri, folder))


def load_encoder(
    uri: str,
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int = 0,
    pooling: str = "auto",
    matryoshka: bool = False,
    progress: Progress = no_progress,
) -> LoadedEncoder:
    """Load the encoder in `folder`. The arguments are those of `load_model`. Raises ModelLoadError."""
    progress("config", 0)
    place = torch.device(device)
    plan = plan_encoder(uri, folder, dtype=dtype, device=place)
    config, classifier, torch_dtype, files = plan.config, plan.classifier, plan.dtype, plan.files
    family = FAMILIES[config.model_type]
    size = sum((folder / name).stat().st_size for name in files)
    progress("weights", 0, 0, size)
    try:
        with torch.device("meta"):
            model = family(config, len(classifier.labels) if classifier else 0)
        read_weights(model, folder, files, family.NAMES, family.PREFIX, torch_dtype, place)
    except MissingWeights as error:
        raise ModelLoadError(uri, f"missing weights: {error}") from error
    except Exception as error:
        raise ModelLoadError(uri, f"weights cannot be loaded: {type(error).__name__}: {error}") from error
    model.eval().requires_grad_(False)
    if place.type == "cpu":
        pack_linears(model)
    with torch.inference_mode():
        if not model(PackedTexts.pack([array("I", [0, 1])], [0], place)).isfinite().all():
            raise ModelLoadError(
                uri, "its hidden states are not finite (NaN or infinity): the weights are damaged, or need --dtype float32"
            )
    progress("weights", 100, size, size)
    return LoadedEncoder(
        model=model,
        path=folder,
        digest=model_digest(folder),
        vocabulary_size=config.vocab_size,
        max_model_len=max_length(uri, folder, model.max_length, max_model_len),
        device=place,
        pooling=_describe_refusal(classifier) if classifier else read_pooling(folder, config, pooling, matryoshka, is_encoder=True),
        classifier=classifier,
        has_types="token_type_ids" in load_tokenizer(folder).model_input_names,
    )


def max_length(uri: str, folder: Path, own: int, wanted: int) -> int:
    """Return the tokens of the longest text: as wanted, or as sentence-transformers' files say (`max_seq_length`), up to the model's."""
    if wanted > own:
        raise ModelLoadError(uri, f"--max-model-len {wanted} is more than the model's {own}")
    settings = read_json(folder / "sentence_bert_config.json")
    trained = settings.get("max_seq_length") if isinstance(settings, dict) else None
    return wanted or min(own, trained or own)


def _read_classifier(uri: str, config: PreTrainedConfig) -> Classifier | None:
    """Return the labels and the activation of a checkpoint with a head, as vLLM reads them; None: it has no head."""
    if not any(name.endswith(HEADED) for name in config.architectures or ()):
        return None
    labels = tuple(str(config.id2label.get(number, f"LABEL_{number}")) for number in range(config.num_labels))
    return Classifier(labels, _read_activation(uri, config, len(labels)))


def _read_activation(uri: str, config: Any, labels: int) -> Activation:
    """Return the activation of a reranker by sentence-transformers' settings, and of more labels by transformers' `problem_type`."""
    if labels > 1:
        kinds: dict[str | None, Activation] = {"regression": "none", "multi_label_classification": "sigmoid"}
        return kinds.get(config.problem_type, "softmax")
    settings = getattr(config, "sentence_transformers", None) or {}
    name = settings.get("activation_fn") or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid"
    known: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}
    if (kind := str(name).rpartition(".")[2]) not in known:
        raise ModelLoadError(uri, f"unsupported architecture: its scores need the activation {name}; served: {', '.join(known)}")
    return known[kind]


def _describe_refusal(classifier: Classifier) -> Pooling:
    served = "scores pairs of texts: use /rerank or /score" if len(classifier.labels) == 1 else "classifies texts: use /classify"
    return Pooling(refused=f"it has a {HEADED} head and {served}")
