"""GLM 4 to 4.6 (Zhipu AI 2024, 2025): a part of each head is rotated; dense ones rotate neighbours and have gate and up in one matrix."""

from typing import Any

from fairlead_worker.model.definition import Definition, NormNames
from fairlead_worker.model.families.experts import make_experts


def glm(config: Any, **different: Any) -> Definition:
    return Definition.read(config, output_bias=False, mlp_bias=False, stacked_mlp=True, interleaved=True, partial_rope=True, **different)


def glm4(config: Any) -> Definition:
    names = NormNames("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    return glm(config, norms=names)


def glm4_moe(config: Any) -> Definition:
    return Definition.read(
        config,
        output_bias=False,
        partial_rope=True,
        head_norms="each" if getattr(config, "use_qk_norm", False) else "none",
        make_mlp=make_experts(config),
    )
