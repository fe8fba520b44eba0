"""Granite (IBM 2024): factors of embeddings, scores, what is added to the residual, and logits."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

from torch import nn

from fairlead_worker.model.definition import Definition, windows_of
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.mlp import GatedMlp, MlpNames


def granite(config: Any, **different: Any) -> Definition:
    return Definition.read(
        config,
        scaling=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
        **different,
    )


def granite_swa(config: Any) -> Definition:
    """Windows, sinks, and ropes of several bases or none (IBM 2026)."""
    config, bases = copy(config), config.layer_rope_theta
    config.rope_parameters = {str(base): config.rope_parameters | {"rope_theta": base} for base in bases if base}
    ropes = tuple(str(base) if base else None for base in bases)
    return granite(config, windows=windows_of(config), ropes=ropes, sinks=True)


def granite_moe(config: Any, **different: Any) -> Definition:
    name = "block_sparse_moe"
    return granite(config, mlp_name=name, make_mlp=make_experts(config, name), **different)


def granite_moe_shared(config: Any) -> Definition:
    """An MLP beside the experts."""
    return granite_moe(config, shared_mlp=("shared_mlp", make_shared(config)))


def make_shared(config: Any) -> Callable[[], nn.Module]:
    names = MlpNames(stack="input_linear", down="output_linear")
    return partial(GatedMlp, config.hidden_size, config.shared_intermediate_size, config.hidden_act, stacked=True, names=names)
