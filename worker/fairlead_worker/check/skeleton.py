"""A decoder without weights, on torch's meta device: made of the same classes as the loader makes it of, a rank's part if it is sharded."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.execution.native_forward import NotNative, check_decoder
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.states import StateSpec
from fairlead_worker.model.attention import UnsupportedAttention
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.model.formats.choose import made_groups, read_format
from fairlead_worker.model.formats.experts import find_experts
from fairlead_worker.model.loader import find_layers
from fairlead_worker.model.plan import LoadPlan
from fairlead_worker.sharding.shards import Shards, Unshardable
from fairlead_worker.sharding.weights import Part, divide, open_tensors


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A decoder without weights."""

    model: PreTrainedModel
    """On the meta device; one of transformers' own is set to the paged attention function."""
    layers: tuple[LayerSpec, ...]
    shards: Shards | None
    """The part that it is; None: the whole model."""
    generates: bool
    """False: the files have no head."""

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what each recurrent layer keeps of a request."""
        return self.model.states if isinstance(self.model, Decoder) else ()


def make_skeleton(uri: str, folder: Path, plan: LoadPlan, ranks: int, quantization: str) -> Skeleton:
    """Return the model of `plan`, of several `ranks` the first one's part. Raises ModelLoadError if it cannot be served or divided."""
    config, generates, shards = _plain(plan.config), True, Shards(0, ranks) if ranks > 1 else None
    family = model_class(config)
    try:
        if plan.gguf is None:
            with open_tensors(folder, plan.files, plan.rename) as tensors:
                if plan.is_wrapped and "lm_head.weight" in tensors:
                    config.tie_word_embeddings = False
                generates = plan.names_head or config.tie_word_embeddings or "lm_head.weight" in tensors
                if shards is not None:
                    form = read_format(uri, plan.config, tensors, quantization)
                    groups = made_groups(quantization) if form is None else form.groups
                    cut = {key: Part(key, tensor, shards, groups) for key, tensor in tensors.items()}
                    return _made(family, config, plan, shards, generates, lambda model: divide(model, shards, cut, groups))
        return _made(family, config, plan, shards, generates)
    except UnsupportedAttention as error:
        if isinstance(error.__cause__, NotImplementedError):  # of the meta device
            cause = f"{family.__name__} cannot be checked without weights, as its code reads numbers while it runs: start a worker with it"
            raise ModelLoadError(uri, cause) from error
        raise ModelLoadError(uri, f"unsupported architecture: {error}") from error
    except Unshardable as error:
        raise ModelLoadError(uri, f"it cannot be divided (--tensor-parallel-size {ranks}): {error}") from error


def native_refusal(skeleton: Skeleton, dtype: torch.dtype, page_size: int) -> str:
    """Return why the native decoder cannot run the whole model on a CPU, by its definition; empty if it can.

    A worker also compares its results with those of the layers. Projections are stacked in place.
    """
    if isinstance(skeleton.model, Decoder):
        skeleton.model.stack()
    try:
        check_decoder(skeleton.model, KVSpec(skeleton.layers, page_size, dtype, torch.device("cpu")), nn.Linear)
    except NotNative as reason:
        return str(reason)
    return ""


def _made(
    family: type[PreTrainedModel],
    config: PreTrainedConfig,
    plan: LoadPlan,
    shards: Shards | None,
    generates: bool,
    cut: Callable[[PreTrainedModel], None] = lambda model: None,
) -> Skeleton:
    with torch.device("meta"):
        model = _make(family, config, plan.dtype)
    cut(model)
    for _, experts in find_experts(model):
        experts.forward = _Experts(experts)
    return Skeleton(model, find_layers(model, plan.max_model_len), shards, generates)


def _make(family: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    text = config.get_text_config(decoder=True)
    own = text if family.config_class is type(text) else config  # as AutoModelForCausalLM does
    model: PreTrainedModel = family._from_config(own, dtype=dtype)
    return model.eval().requires_grad_(False)


def _plain(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of `config` without its quantization: transformers would put a library's modules into the model."""
    copied = deepcopy(config)
    if hasattr(copied, "quantization_config"):
        del copied.quantization_config
    return copied


class _Experts:
    """In place of a family's loop over experts, whose steps depend on the routing: makes the tensors of `fused.experts`, and drops them."""

    def __init__(self, module: nn.Module) -> None:
        named: Any = module
        self._outputs = [max(named.gate_up_proj.shape[1:]), max(named.down_proj.shape[1:])]
        self._width = min(named.gate_up_proj.shape[1:])

    def __call__(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        rows = [hidden_states.new_empty(top_k_index.numel(), outputs) for outputs in self._outputs]
        del rows
        return torch.empty_like(hidden_states)
