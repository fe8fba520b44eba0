"""Decoders with experts: our attention and norms, and transformers' own blocks of a router and experts (`fused.experts`, `lowbit`)."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from fairlead_worker.model.definition import BEFORE, Definition, windows_of
from fairlead_worker.model.families import llama
from fairlead_worker.model.layers.mlp import GatedMlp


def make_experts(config: Any, name: str = "mlp") -> Callable[[int], nn.Module]:
    """Return what makes the part `name` of transformers' layer of a number. Ordinary MLPs, also those beside experts, become ours."""
    module = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    layer_class = next(value for end in ("DecoderLayer", "Block") for title, value in vars(module).items() if title.endswith(end))

    def make(index: int) -> nn.Module:
        block: nn.Module = getattr(layer_class(config, index), name)
        for path, child in list(block.named_children()):
            if _is_mlp(child):
                setattr(block, path, _own(child))
        return _own(block) if _is_mlp(block) else block

    def _own(mlp: Any) -> GatedMlp:
        return GatedMlp(config.hidden_size, mlp.gate_proj.out_features, config.hidden_act, mlp.gate_proj.bias is not None)

    return make


def _is_mlp(module: nn.Module) -> bool:
    return {name for name, child in module.named_children() if isinstance(child, nn.Linear)} == {"gate_proj", "up_proj", "down_proj"}


def mixtral(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), bias=False, output_bias=False, make_mlp=make_experts(config))


def qwen2_moe(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), bias=config.qkv_bias, output_bias=False, make_mlp=make_experts(config))


def qwen3_moe(config: Any) -> Definition:
    return Definition.read(config, windows=windows_of(config), head_norms="each", make_mlp=make_experts(config))


def olmoe(config: Any) -> Definition | None:
    if config.clip_qkv is not None:
        return None
    return Definition.read(config, head_norms="all", make_mlp=make_experts(config))


def minimax_m2(config: Any) -> Definition:
    return Definition.read(config, head_norms="all", partial_rope=True, bias=False, output_bias=False, make_mlp=make_experts(config))


def exaone_moe(config: Any) -> Definition:
    """Unlike dense models of EXAONE 4, with norms before the sublayers."""
    return llama.exaone4(config, norms=BEFORE, make_mlp=make_experts(config))


def ernie_moe(config: Any) -> Definition:
    return llama.ernie(config, make_mlp=make_experts(config))


def gpt_oss(config: Any) -> Definition:
    """Every head attends to a sink too, whose score is learned (OpenAI 2025)."""
    return Definition.read(config, windows=windows_of(config), sinks=True, make_mlp=make_experts(config))
