"""Granite (IBM 2024): factors of embeddings, scores, what is added to the residual, and logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fairlead_worker.model.definition import Definition
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.layers.mlp import StackedMlp


def granite(config: Any, **different: Any) -> Definition:
    return Definition.read(
        config,
        scaling=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
        **different,
    )


def granite_moe(config: Any, **different: Any) -> Definition:
    name = "block_sparse_moe"
    return granite(config, mlp_name=name, make_mlp=make_experts(config, name), **different)


def granite_moe_shared(config: Any) -> Definition:
    """An MLP beside the experts."""
    return granite_moe(config, shared_mlp=("shared_mlp", make_shared(config)))


def make_shared(config: Any) -> Callable[[], nn.Module]:
    return partial(StackedMlp, config.hidden_size, config.shared_intermediate_size, config.hidden_act, ("input_linear", "output_linear"))
