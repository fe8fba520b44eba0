"""Granite (IBM 2024): factors of embeddings, scores, what is added to the residual, and logits."""

from typing import Any

from fairlead_worker.model.decoder import Definition
from fairlead_worker.model.families.experts import make_experts


def granite(config: Any, **different: Any) -> Definition:
    return Definition.read(
        config,
        scaling=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
        **different,
    )


def granite_moe(config: Any) -> Definition:
    name = "block_sparse_moe"
    return granite(config, mlp_name=name, make_mlp=make_experts(config, name))
