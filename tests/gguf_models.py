"""GGUF files of random models for tests, written by the package gguf from transformers' models.

Names of tensors come from gguf's own table and llama.cpp's changes of values from its converter, so that they check ours.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from tests.models import FAMILIES, build_model
from tests.worker.native.test_ggml import blocks_of
from transformers import PreTrainedModel

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
"""model_type -> `general.architecture`, where they differ."""
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|im_start|>", "<|im_end|>"]
TEXT = "the cat sat on a mat and then they ate that meat at the table 12 345 times"
Change = Callable[[GGUFWriter], object]


def write_gguf(
    model: PreTrainedModel, path: Path, kind: str | Callable[[str], str] = "F32", *, change: Change = lambda writer: None, **fields: Any
) -> Path:
    """Write `model` with a byte-level tokenizer.

    kind: type of the matrices, or of the matrix of a name; K types get random blocks, as gguf cannot write them. fields: of the
    architecture, by llama.cpp's names with __ for dots; they replace those of the model's configuration.
    """
    config = model.config
    name = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, name)
    for key, value in (_fields(config) | fields).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{name}.{key.replace('__', '.')}", value)
    add_vocabulary(writer, config.vocab_size)
    change(writer)
    names = get_tensor_name_map(next(arch for arch, label in MODEL_ARCH_NAMES.items() if label == name), config.num_hidden_layers)
    for parameter, value in model.state_dict().items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = parameter.rpartition(".")
        tensor = f"{names.get_name(stem)}.{suffix}"
        _add_tensor(writer, tensor, _as_in_file(config, parameter, value), kind if isinstance(kind, str) else kind(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _fields(config: Any) -> dict[str, Any]:
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__key_length": head,
        "attention__value_length": head,
        "attention__layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope__freq_base": float(rope["rope_theta"]),
        "rope__dimension_count": head,
    }
    if config.model_type.startswith("gemma") and config.model_type != "gemma":
        found["attention__sliding_window"] = config.sliding_window
        softcaps = {name: getattr(config, name) for name in ("attn_logit_softcapping", "final_logit_softcapping")}
        found |= {name: float(value) for name, value in softcaps.items() if value}
    return found


def _as_in_file(config: Any, parameter: str, value: torch.Tensor) -> torch.Tensor:
    """Return a parameter as llama.cpp's converter writes it."""
    if config.model_type.startswith("gemma") and parameter.endswith("norm.weight"):
        return value + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    owner = parameter.split(".")[-2]
    if ARCHITECTURES.get(config.model_type, config.model_type) == "llama" and owner in heads:
        return value.view(heads[owner], 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    return value


def _add_tensor(writer: GGUFWriter, name: str, value: torch.Tensor, kind: str) -> None:
    if value.dim() == 1 or kind == "F32":
        writer.add_tensor(name, value.float().numpy())
        return
    ggml = GGMLQuantizationType[kind]
    if kind.endswith("K"):
        size = value.std().item() / (8 if kind == "Q6_K" else 32) / {"Q4_K": 16, "Q5_K": 32, "Q6_K": 16}[kind] ** 0.5
        rows = blocks_of(kind, value.shape[0], value.shape[1], seed=len(name), size=size).numpy()
    else:
        rows = quants.quantize(value.float().numpy(), ggml).view(np.uint8).reshape(value.shape[0], -1)
    assert rows.shape[1] == value.shape[1] // GGML_QUANT_SIZES[ggml][0] * GGML_QUANT_SIZES[ggml][1]
    writer.add_tensor(name, rows, raw_dtype=ggml)


@cache
def byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def add_vocabulary(writer: GGUFWriter, size: int, pre: str = "gpt-2") -> None:
    """Write a byte-level tokenizer of exactly `size` tokens, trained on `TEXT`."""
    tokens, merges = [*SPECIAL, *byte_alphabet()], []
    for word in TEXT.split():
        pieces = ["Ġ", *word]
        while len(pieces) > 1 and len(tokens) < size:
            merged = pieces[0] + pieces[1]
            if merged not in tokens:
                merges.append(f"{pieces[0]} {pieces[1]}")
                tokens.append(merged)
            pieces[:2] = [merged]
    tokens += [f"[PAD{number}]" for number in range(len(tokens), size)]
    kinds = [3 if token in SPECIAL else 5 if token.startswith("[PAD") else 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)


def small_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Return a random model whose rows are whole blocks of every type."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.05}
    with patch.dict(FAMILIES, {"gemma": ("gemma", FAMILIES["llama"][1])}):
        return build_model(family, **(sizes | overrides))
