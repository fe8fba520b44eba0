"""Further families, built small at random, each with its own features. `tests.models.FAMILIES` are tested far more thoroughly."""

from typing import Any

from tests.models import _COMMON as COMMON
from tests.models import LENGTH, VOCABULARY

ORIGINAL = 128
"""Tokens before a rope was scaled: most prompts are longer."""
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_OPT = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "init_std": 0.2,
    "max_position_embeddings": LENGTH, "word_embed_proj_dim": 64, "tie_word_embeddings": False, "pad_token_id": 1,
}  # fmt: skip


def _rope(kind: str, **settings: object) -> dict[str, Any]:
    return COMMON | {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **settings}}


MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", COMMON | {"pad_token_id": 0}),
    "gpt_neox": ("gpt_neox", COMMON),
    "olmo2": ("olmo2", COMMON),
    "olmo3": ("olmo3", COMMON | {"sliding_window": 48, "num_hidden_layers": 4}),
    "granite": (
        "granite",
        COMMON | {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "starcoder2": ("starcoder2", COMMON | {"sliding_window": 64}),
    "opt": ("opt", _OPT),
    "cohere2": ("cohere2", COMMON | {"sliding_window": 48, "num_hidden_layers": 4}),
    "glm4": ("glm4", COMMON | {"head_dim": 16}),
    "smollm3": ("smollm3", COMMON),
    "tied qwen2": ("qwen2", COMMON | {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", COMMON | _LOCAL),
    "qwen2_moe": ("qwen2_moe", COMMON | _MOE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [0]}),
    "qwen3_moe": ("qwen3_moe", COMMON | _MOE | {"head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("olmoe", COMMON | {"num_experts": 8, "num_experts_per_tok": 2}),
    "granitemoe": ("granitemoe", COMMON | _LOCAL),
    "glm4_moe": ("glm4_moe", COMMON | _ROUTED | {"head_dim": 16}),
    "deepseek_v3": ("deepseek_v3", COMMON | _ROUTED | _LATENT | {"n_group": 2, "topk_group": 1}),
    "gpt_oss": ("gpt_oss", COMMON | _LOCAL | {"head_dim": 16, "sliding_window": 48, "num_hidden_layers": 4}),
    "linear rope": ("llama", _rope("linear", factor=4.0)),
    "yarn rope": ("qwen3", _rope("yarn", factor=32.0, original_max_position_embeddings=ORIGINAL)),
    "llama3 rope": (
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
    ),
    "dynamic rope": ("llama", _rope("dynamic", factor=4.0) | {"max_position_embeddings": 400}),
    "longrope": (
        "phi3",
        _rope(
            "longrope",
            original_max_position_embeddings=ORIGINAL,
            short_factor=[1 + place / 10 for place in range(8)],
            long_factor=[2 + place / 2 for place in range(8)],
        )
        | {"pad_token_id": 0, "original_max_position_embeddings": ORIGINAL},
    ),
}
