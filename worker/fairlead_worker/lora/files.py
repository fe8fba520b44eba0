"""LoRA adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors. Unsupported features are rejected by name."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load

from fairlead_worker.errors import AdapterError
from fairlead_worker.lora.source import CONFIG, WEIGHTS, check_readable
from fairlead_worker.sharding.shards import AnyCut

_PREFIX = "base_model.model."
_PART = re.compile(r"(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_HARMLESS = {
    "peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "fan_in_fan_out", "bias", "init_lora_weights", "megatron_core", "qalora_group_size",
    "eva_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Fields without effect here, or checked below. Any other field with a value is an unsupported feature."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's own weights: the adapter alone is not the fine-tune."""


class Pair(NamedTuple):
    """The addition to one linear layer's output for x: `up @ (down @ x)`."""

    down: torch.Tensor
    """[rank, in_features]; PEFT's A."""
    up: torch.Tensor
    """[out_features, rank]; PEFT's B, in float32 and multiplied by the scaling."""


def part_of(pair: Pair, cut: AnyCut) -> Pair:
    """Return a rank's part for `cut` of the layer's weight [out_features, in_features]. It is a copy, so that the rest can be freed.

    If a layer is cut by its outputs, `up` is cut likewise and `down` is whole. If it is cut by its inputs, `down` is cut and `up` is
    whole: the addition is then part of the layer's own sum over the ranks and needs no extra sum. vLLM's layers do the same, except its
    "fully sharded" ones, which trade a smaller `down` for one more message. Ranks that share a KV head, or a whole layer, have the same
    part.
    """
    if cut.dim == 0:
        return Pair(pair.down, torch.cat([pair.up[part.begin : part.end] for part in cut.parts]))
    return Pair(torch.cat([pair.down[:, part.begin : part.end] for part in cut.parts], 1), pair.up)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter as it was trained."""

    digest: str
    """Digest of every byte of both files: adapters with equal digests are the same, and may share KV."""
    rank: int
    pairs: dict[str, Pair]
    """By the path of the linear layer in the model."""


def read_adapter(name: str, uri: str, folder: Path, max_rank: int) -> AdapterFiles:
    """Read the adapter in `folder`. Raises AdapterError if it is unreadable, unsupported, or has a rank above `max_rank`."""

    def refuse(cause: str) -> AdapterError:
        return AdapterError(name, uri, cause)

    try:
        check_readable(name, uri, folder)
        raw, weights = (folder / CONFIG).read_bytes(), (folder / WEIGHTS).read_bytes()
        config = json.loads(raw)
        tensors = load(weights)
    except FileNotFoundError as error:
        pickled = (folder / "adapter_model.bin").exists()
        hint = "; adapter_model.bin is pickled, and pickles run code: convert it to safetensors" if pickled else ""
        raise refuse(f"there is no {Path(str(error.filename)).name} in {folder}{hint}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise refuse(f"its files cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise refuse(f"{CONFIG} is no JSON object")
    _check_config(config, refuse)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in sorted(tensors.items()):  # sorted: every reader reports the same fault first
        part = _PART.fullmatch(key.removeprefix(_PREFIX))
        if part is None:
            raise refuse(f"it has {key}, which is no lora_A or lora_B weight of a linear layer: only those are served")
        if not tensor.is_floating_point():
            raise refuse(f"{key} is of {str(tensor.dtype).removeprefix('torch.')}: weights are floating-point numbers")
        if not tensor.isfinite().all():
            raise refuse(f"{key} has values that are not finite")
        halves.setdefault(part["module"], {})[part["half"]] = tensor
    if not halves:
        raise refuse(f"{WEIGHTS} has no tensors")
    pairs = {module: _pair(module, found, config, refuse) for module, found in halves.items()}
    rank = max(len(pair.down) for pair in pairs.values())
    if rank > max_rank:
        raise refuse(f"its rank is {rank}, and at most {max_rank} is served: raise --max-lora-rank")
    digest = xxhash.xxh3_128(len(raw).to_bytes(8, "little") + raw)
    digest.update(weights)
    return AdapterFiles(digest.hexdigest(), rank, pairs)


def _check_config(config: Mapping[str, Any], refuse: Any) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise refuse(f"peft_type is {kind!r}: only LORA is served")
    for field, value in config.items():
        if field not in _HARMLESS and value not in (None, False, 0, "", "none") and value != {} and value != []:
            raise refuse(f"{field} is set ({json.dumps(value)[:60]}), which is not served: only plain and rank-stabilized LoRA is")
    for field in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(field) or {}, dict):
            raise refuse(f"{field} is {json.dumps(config[field])[:60]}: it must be an object, from a layer's name to a number")
        for pattern in config.get(field) or {}:
            try:
                re.compile(pattern)
            except re.error as error:
                raise refuse(f"{field} has {pattern!r}, which is no regular expression: {error}") from error
    if config.get("bias", "none") != "none":
        raise refuse(f"bias is {config['bias']!r}: trained biases are not served")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise refuse(f"init_lora_weights is {start!r}, which changes the base model: save it with path_initial_model_for_weight_conversion")


def _pair(module: str, halves: Mapping[str, torch.Tensor], config: Mapping[str, Any], refuse: Any) -> Pair:
    if halves.keys() != {"A", "B"}:
        raise refuse(f"{module} has lora_{next(iter(halves))} and not the other half")
    down, up = halves["A"], halves["B"]
    if down.dim() != 2 or up.dim() != 2 or len(down) != up.shape[1] or not len(down):
        raise refuse(f"the weights of {module} are of {list(down.shape)} and {list(up.shape)}: [rank, in] and [out, rank] are needed")
    rank, alpha = _of(module, config, "rank_pattern", "r"), _of(module, config, "alpha_pattern", "lora_alpha")
    if rank != len(down):
        raise refuse(f"{module} is of rank {len(down)}, and {CONFIG} says r {rank}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise refuse(f"lora_alpha is {alpha!r} for {module}: it must be a number")
    scaling = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return Pair(down, up.float() * scaling)


def _of(module: str, config: Mapping[str, Any], patterns: str, field: str) -> Any:
    """Return a layer's value of a field. PEFT's patterns match the end of the layer's path."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config.get(field)
