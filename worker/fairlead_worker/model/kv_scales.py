"""Scales of float8 KV: those that a checkpoint has, else 1.

compressed-tensors writes `layers.N.self_attn.k_scale` and `v_scale`, ModelOpt `layers.N.self_attn.k_proj.k_scale` and `v_proj.v_scale`,
older checkpoints `kv_scale`, or the `output_scale` of both projections. The larger of a layer's scales serves keys and values
(`kernels.float8` says why), as in TensorRT-LLM.
"""

import logging
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.sharding.weights import open_tensors

logger = logging.getLogger(__name__)

_SCALE = re.compile(r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:[kv]_scale|kv_scale|k_proj\.(?:k|output)_scale|v_proj\.(?:v|output)_scale)$")


def read_kv_scales(uri: str, folder: Path, files: Iterable[str], layers: Sequence[int]) -> tuple[float, ...]:
    """Return the scale of each of the `layers`, which have KV, from the weight `files` of `folder`. Raises ModelLoadError."""
    found: dict[int, float] = {}
    wanted = set(layers)
    with open_tensors(folder, files) as tensors:
        for name, tensor in tensors.items():
            if (match := _SCALE.search(name)) and (layer := int(match[1])) in wanted:
                found[layer] = max(found.get(layer, 0.0), _read(uri, name, tensor[...]))
    if not found:
        logger.info("--kv-cache-dtype fp8: the checkpoint has no scales of the KV cache, so all are 1")
    elif missing := len(wanted) - len(found):
        logger.warning("--kv-cache-dtype fp8: %d of %d layers have no scale in the checkpoint, so theirs is 1", missing, len(wanted))
    return tuple(found.get(layer, 1.0) for layer in layers)


def _read(uri: str, name: str, tensor: torch.Tensor) -> float:
    if tensor.numel() != 1:
        raise ModelLoadError(uri, f"{name} has {tensor.numel()} scales, and only one for a layer is supported: take --kv-cache-dtype auto")
    scale = float(tensor.float().item())
    if not (scale > 0 and math.isfinite(scale)):
        raise ModelLoadError(uri, f"{name} is {scale}, and a scale of the KV cache is above 0: correct it, or take --kv-cache-dtype auto")
    return scale
