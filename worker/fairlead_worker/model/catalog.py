"""The families of decoders that the tests compare with transformers, and those that are refused: one list for tests, docs and
`fairlead models`. No torch.

Each family is a small config that has its mechanisms. `tests/worker/exactness` builds it with random weights, and checks its tokens, its
path and its mechanisms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from fairlead_worker.model.wrappers import PLAIN, WRAPPERS

Path = Literal["native", "layers", "transformers"]
ENCODERS: Final = ("bert", "camembert", "modernbert", "roberta", "xlm-roberta")
"""The keys of `families.registry.FAMILIES`, which imports torch."""
PATHS: Final[Mapping[str, str]] = {
    "native": "a definition of our own, of which one native call runs a whole step on a CPU",
    "layers": "a definition of our own, layer by layer; experts are transformers' blocks",
    "transformers": "transformers' code, around our attention and linear layers",
    "encoder": "layers of our own, without padding",
}
COMPARED: Final[Mapping[str, str]] = {
    "every setting": "20 prompts of up to 333 tokens: alone, batched, chunks of 16, 64 and 512, without a prefix cache, cold and cached, "
    "preempted, with a host tier of KV, and over two ranks (--tensor-parallel-size 2)",
    "one device": "the same but for two ranks: its weights cannot be divided",
    "text part": "the text part of a model that also reads images or sound, with the whole model's tokens; tied and untied",
    "checkpoint": "a checkpoint with this model_type, with the tokens of the model that it is",
    "vectors and classes": "vectors, scores and classes with transformers', within 1e-5: alone and batched",
}
VOCABULARY: Final = 512
LENGTH: Final = 4096
ORIGINAL: Final = 128
"""Tokens before a rope was scaled: most prompts are longer."""
COMMON: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
"""Untied embeddings and a wide initial range: otherwise a random model repeats its last token, and an engine that attends to the wrong
keys would go unnoticed."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family that is served."""

    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the small config, besides `COMMON`."""
    path: Path = "transformers"
    mechanisms: str = ""
    """As `model.mechanisms` finds them."""

    @property
    def config(self) -> dict[str, Any]:
        """Return the settings of the small config."""
        return {**COMMON, **self.settings}


@dataclass(frozen=True, slots=True)
class Refused:
    """A family that is refused when it is loaded."""

    model_type: str
    reason: str
    """Part of the error, too."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of a small config, besides `COMMON`."""

    @property
    def config(self) -> dict[str, Any]:
        """Return the settings of the small config."""
        return {**COMMON, **self.settings}


_GEMMA: Final = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 48, "num_hidden_layers": 4}
_GPT2: Final = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH}
_HEADS: Final = {"head_dim": 16}
_WINDOWS: Final = {"sliding_window": 48, "num_hidden_layers": 4}
_TYPES: Final = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_MOE: Final = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LOCAL: Final = {"num_local_experts": 8, "num_experts_per_tok": 2}
_SHARED: Final = {"num_shared_experts": 1}
_ROUTED: Final = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_GROUPS: Final = {"n_group": 2, "topk_group": 1}
_LATENT: Final = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
_GEMMA4: Final = {
    "head_dim": 16,
    "sliding_window": 48,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
}
_MAMBA: Final = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "num_hidden_layers": 3, "mamba_chunk_size": 32}
_GRANITE_HYBRID: Final = {
    **_MAMBA,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "shared_intermediate_size": 64,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
_ZAMBA2: Final = {
    "time_step_min": 1e-6,  # transformers holds it in prompts alone
    "n_mamba_heads": 8,
    "mamba_ngroups": 2,
    "mamba_d_state": 16,
    "chunk_size": 32,
    "adapter_rank": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "tie_word_embeddings": True,
}
_CHUNKS: Final = {"num_hidden_layers": 4, "attention_chunk_size": 48, "floor_scale": 64, "intermediate_size_mlp": 96}
_LINEAR: Final = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA: Final = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_OLMO_HYBRID: Final = {**_DELTA, "head_dim": 16, "linear_num_key_heads": 4}
"""transformers saves its convolution in three equal parts, so there are as many keys as values."""
_OPT: Final = {"ffn_dim": 128, "init_std": 0.2, "word_embed_proj_dim": 64, "pad_token_id": 1}


def _rope(kind: str, **settings: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, "rope_type": kind, **settings}}


_STRETCHED: Final = _rope("dynamic", alpha=1000.0, factor=1.0, original_max_position_embeddings=ORIGINAL)
"""As of HY-MT1.5. The rope is the same for each length, so texts may be longer than the original context."""

SERVED: Final[Mapping[str, Family]] = {
    "llama": Family("llama", path="native"),
    "qwen2": Family("qwen2", path="native"),
    "qwen3": Family("qwen3", {"head_dim": 32}, path="native"),
    "mistral": Family("mistral", {"sliding_window": 100}, path="native", mechanisms="windows"),
    "gemma2": Family(
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
        path="native",
        mechanisms="windows and full attention, soft-capped scores, soft-capped logits",
    ),
    "gemma3": Family("gemma3_text", {**_GEMMA, "sliding_window_pattern": 3}, path="native", mechanisms="windows and full attention"),
    "gpt2": Family("gpt2", _GPT2, path="native"),
    "gpt2 with scores by layer": Family("gpt2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}, path="native"),
    "afmoe": Family("afmoe", {**_HEADS, **_MOE, **_SHARED, **_WINDOWS}, mechanisms="windows and full attention, experts"),
    "apertus": Family("apertus", path="native", mechanisms="llama3 rope"),
    "arcee": Family("arcee", {**_HEADS, "mlp_bias": True}, path="native"),
    "aria (text)": Family("aria_text", {**_HEADS, "moe_num_experts": 8, "moe_num_shared_experts": 1, "moe_topk": 2}, mechanisms="experts"),
    "axk1": Family("axk1", {**_ROUTED, **_LATENT, **_GROUPS}, path="layers", mechanisms="latents, experts"),
    "bamba": Family("bamba", {**_MAMBA, "attn_layer_indices": [2]}, path="layers", mechanisms="recurrent states"),
    "bitnet": Family("bitnet"),
    "cohere": Family("cohere", path="native"),
    "cohere with norms of heads": Family("cohere", {"use_qk_norm": True}, path="native"),
    "cohere2": Family("cohere2", _WINDOWS, path="native", mechanisms="windows and full attention"),
    "cohere_compass (text)": Family(
        "cohere_compass_text",
        {
            **_WINDOWS,
            **_TYPES,
            "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
        },
        mechanisms="windows and full attention",
    ),
    "cohere2_moe": Family("cohere2_moe", {**_HEADS, **_MOE, **_SHARED, **_WINDOWS}, mechanisms="windows and full attention, experts"),
    "ctrl": Family("ctrl", {**_GPT2, "dff": 128}),
    "cwm": Family("cwm", {**_HEADS, **_WINDOWS}, path="native", mechanisms="windows and full attention, llama3 rope"),
    "dbrx": Family(
        "dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": LENGTH,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        },
        mechanisms="experts",
    ),
    "deepseek_v2": Family("deepseek_v2", {**_ROUTED, **_LATENT, **_GROUPS}, path="layers", mechanisms="latents, experts"),
    "deepseek_v3": Family("deepseek_v3", {**_ROUTED, **_LATENT, **_GROUPS}, path="layers", mechanisms="latents, experts"),
    "deepseek_v2 without latents of queries": Family(
        "deepseek_v2",
        {
            **_ROUTED,
            **_LATENT,
            **_GROUPS,
            "q_lora_rank": None,
            **_rope("yarn", factor=32.0, original_max_position_embeddings=ORIGINAL, mscale=0.707, mscale_all_dim=0.707),
        },
        path="layers",
        mechanisms="latents, experts, yarn rope",
    ),
    "deepseek_v3 that rotates halves": Family(
        "deepseek_v3",
        {
            **_ROUTED,
            **_LATENT,
            **_GROUPS,
            "rope_interleave": False,
            **_rope("yarn", factor=32.0, original_max_position_embeddings=ORIGINAL, mscale=1.0, mscale_all_dim=0.5),
        },
        path="layers",
        mechanisms="latents, experts, yarn rope",
    ),
    "dots1": Family("dots1", {**_ROUTED, **_GROUPS, **_WINDOWS, **_TYPES}, path="layers", mechanisms="windows and full attention, experts"),
    "ernie4_5": Family("ernie4_5", {**_HEADS, "use_bias": True}, path="native"),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {"moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 8, "moe_num_shared_experts": 1},
        path="layers",
        mechanisms="experts",
    ),
    "exaone4": Family("exaone4", _WINDOWS, path="native", mechanisms="windows and full attention"),
    "exaone_moe": Family(
        "exaone_moe",
        {**_MOE, **_SHARED, **_GROUPS, **_WINDOWS, "first_k_dense_replace": 1},
        path="layers",
        mechanisms="windows and full attention, experts",
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 2.0,
            "mlp_multipliers": [0.7, 1.3],
            "key_multiplier": 1.5,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.2,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 1.05],
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.75,
        },
        path="layers",
        mechanisms="recurrent states",
    ),
    "falcon_h1 with norms": Family(
        "falcon_h1",
        {**_MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        path="layers",
        mechanisms="recurrent states",
    ),
    "falcon_mamba": Family("falcon_mamba", {"state_size": 8}, path="layers", mechanisms="recurrent states"),
    "flex_olmo": Family("flex_olmo", {"num_experts": 8, "num_experts_per_tok": 2}, mechanisms="experts"),
    "flint": Family(
        "flint",
        {**_HEADS, **_MOE, **_WINDOWS, "shared_expert_intermediate_size": 64},
        mechanisms="windows and full attention, attention sinks, experts",
    ),
    "gemma": Family("gemma", _HEADS, path="native"),
    "gemma4 (text)": Family(
        "gemma4_text",
        {**_GEMMA4, "global_head_dim": 32},
        path="layers",
        mechanisms="windows and full attention, layers with other heads, proportional rope",
    ),
    "gemma4 (experts)": Family(
        "gemma4_text",
        {
            **_HEADS,
            **_WINDOWS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        path="layers",
        mechanisms="windows and full attention, layers with other heads, experts, proportional rope",
    ),
    "gemma3n (text)": Family("gemma3n_text", _GEMMA4, path="layers", mechanisms="windows and full attention, soft-capped logits"),
    "gemma4_unified (text)": Family(
        "gemma4_unified_text",
        {**_HEADS, **_WINDOWS, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        path="layers",
        mechanisms="windows and full attention, layers with other heads, proportional rope",
    ),
    "glm": Family("glm", _HEADS, path="native"),
    "glm4": Family("glm4", _HEADS, path="native"),
    "glm4_moe": Family("glm4_moe", {**_HEADS, **_ROUTED}, path="layers", mechanisms="experts"),
    "glm4_moe_lite": Family("glm4_moe_lite", {**_ROUTED, **_LATENT, **_GROUPS}, path="layers", mechanisms="latents, experts"),
    "gpt-sw3": Family("gpt-sw3", _GPT2, path="native"),
    "gpt_bigcode": Family("gpt_bigcode", _GPT2, path="native"),
    "gpt_bigcode with all keys": Family("gpt_bigcode", {**_GPT2, "multi_query": False}, path="native"),
    "gpt_neox": Family("gpt_neox", path="native"),
    "gpt_neox in sequence": Family("gpt_neox", {"use_parallel_residual": False}, path="native"),
    "gpt_oss": Family(
        "gpt_oss",
        {**_HEADS, **_LOCAL, **_WINDOWS},
        path="layers",
        mechanisms="windows and full attention, attention sinks, experts, yarn rope",
    ),
    "granite": Family(
        "granite",
        {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        path="native",
    ),
    "granite_swa": Family(
        "granite_swa",
        {**_WINDOWS, "attention_multiplier": 0.25, "layer_rope_theta": [10_000, 0, 5000, 10_000]},
        "native",
        "windows and full attention, attention sinks",
    ),
    "granitemoe": Family("granitemoe", _LOCAL, path="layers", mechanisms="experts"),
    "granitemoe_swa": Family(
        "granitemoe_swa",
        {**_LOCAL, **_WINDOWS, "shared_intermediate_size": 64},
        mechanisms="windows and full attention, attention sinks, experts",
    ),
    "granitemoehybrid": Family("granitemoehybrid", {**_GRANITE_HYBRID, **_LOCAL}, path="layers", mechanisms="recurrent states, experts"),
    "granitemoehybrid without experts": Family(
        "granitemoehybrid",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
        path="layers",
        mechanisms="recurrent states",
    ),
    "granitemoeshared": Family("granitemoeshared", {**_LOCAL, "shared_intermediate_size": 64}, path="layers", mechanisms="experts"),
    "helium": Family("helium", _HEADS, path="native"),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", _HEADS, path="native"),
    "hunyuan_v1_dense with a stretched rope": Family("hunyuan_v1_dense", {**_HEADS, **_STRETCHED}, path="native"),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", {**_HEADS, "num_experts": 8, "moe_topk": 2}, mechanisms="experts"),
    "hunyuan_v1_moe with a stretched rope": Family(
        "hunyuan_v1_moe", {**_HEADS, **_STRETCHED, "num_experts": 8, "moe_topk": 2}, mechanisms="experts"
    ),
    "hy_v3": Family("hy_v3", {**_HEADS, **_MOE, **_SHARED}, path="layers", mechanisms="experts"),
    "internlm3": Family("internlm3", _HEADS, path="native"),
    "iquestcoder": Family("iquestcoder", _HEADS, path="native"),
    "jais2": Family("jais2", _HEADS, path="native"),
    "jamba": Family(
        "jamba",
        {"num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 2},
        path="layers",
        mechanisms="recurrent states, experts",
    ),
    "jetmoe": Family("jetmoe", _LOCAL, mechanisms="experts"),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **_LATENT,
            **_LOCAL,
            "q_lora_rank": None,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_heads": 4,
            "linear_head_dim": 16,
        },
        path="layers",
        mechanisms="recurrent states, latents, experts",
    ),
    "kolibri1": Family(
        "kolibri1",
        {**_HEADS, **_LOCAL, **_WINDOWS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
        mechanisms="windows, experts",
    ),
    "laguna": Family(
        "laguna",
        {**_HEADS, **_MOE, **_WINDOWS, **_TYPES, "shared_expert_intermediate_size": 64},
        mechanisms="windows and full attention, experts",
    ),
    "llama4 (text)": Family(
        "llama4_text",
        {**_HEADS, **_LOCAL, **_CHUNKS, "interleave_moe_layer_step": 2},
        path="layers",
        mechanisms="chunked and full attention, experts",
    ),
    "llama4 (text) without norms": Family(
        "llama4_text",
        {**_HEADS, "num_local_experts": 8, **_CHUNKS, "use_qk_norm": False, "attn_temperature_tuning": False},
        path="layers",
        mechanisms="chunked and full attention, experts",
    ),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **_LATENT,
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 128,
            "moe_topk": 2,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "expert_ffn_hidden_size": 32,
        },
        path="layers",
        mechanisms="latents, experts",
    ),
    "mamba": Family("mamba", {"state_size": 8}, path="layers", mechanisms="recurrent states"),
    "mamba2": Family(
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 32},
        path="layers",
        mechanisms="recurrent states",
    ),
    "mellum": Family(
        "mellum", {**_HEADS, **_LOCAL, **_WINDOWS, **_TYPES, "moe_intermediate_size": 32}, mechanisms="windows and full attention, experts"
    ),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {**_HEADS, **_ROUTED, **_GROUPS, **_WINDOWS, "v_head_dim": 16},
        mechanisms="windows and full attention, attention sinks, layers with other heads, experts",
    ),
    "minicpm3": Family("minicpm3", _LATENT, path="layers", mechanisms="latents"),
    "minimax_m2": Family("minimax_m2", {**_HEADS, **_LOCAL}, path="layers", mechanisms="experts"),
    "ministral": Family("ministral", {**_HEADS, **_WINDOWS}, path="native", mechanisms="windows"),
    "ministral3": Family("ministral3", _HEADS, path="native", mechanisms="yarn rope"),
    "ministral3 beyond its original context": Family(
        "ministral3",
        {**_HEADS, **_rope("yarn", factor=32.0, original_max_position_embeddings=ORIGINAL, llama_4_scaling_beta=0.5)},
        path="native",
        mechanisms="yarn rope",
    ),
    "mixtral": Family("mixtral", _LOCAL, path="layers", mechanisms="experts"),
    "modernbert-decoder": Family(
        "modernbert-decoder", {"local_attention": 96, "num_hidden_layers": 4, "pad_token_id": 0}, mechanisms="windows and full attention"
    ),
    "nanochat": Family("nanochat", path="native", mechanisms="soft-capped logits"),
    "nemotron": Family("nemotron", {**_HEADS, "partial_rotary_factor": 0.5, "mlp_bias": True}, path="native"),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "hybrid_override_pattern": "ME*-M",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "mamba_n_groups": 2,
            "chunk_size": 32,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 64,
        },
        path="layers",
        mechanisms="recurrent states, experts",
    ),
    "olmo": Family("olmo", path="native"),
    "olmo, clipped": Family("olmo", {"clip_qkv": 1.5}),
    "olmo2": Family("olmo2", path="native"),
    "olmo3": Family("olmo3", _WINDOWS, path="native", mechanisms="windows and full attention"),
    "olmo_hybrid": Family("olmo_hybrid", _OLMO_HYBRID, path="layers", mechanisms="recurrent states"),
    "olmo_hybrid without ropes": Family(
        "olmo_hybrid",
        {**_OLMO_HYBRID, "rope_parameters": None, "linear_allow_neg_eigval": False},
        path="layers",
        mechanisms="recurrent states",
    ),
    "olmoe": Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}, path="layers", mechanisms="experts"),
    "olmoe, clipped": Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 1.5}, mechanisms="experts"),
    "opt": Family("opt", _OPT, path="native"),
    "opt with norms after": Family("opt", {**_OPT, "do_layer_norm_before": False}),
    "persimmon": Family("persimmon", path="native"),
    "phi": Family("phi", path="native"),
    "phi with norms of heads": Family("phi", {"qk_layernorm": True}, path="native"),
    "phi3": Family("phi3", {"pad_token_id": 0}, path="native"),
    "phimoe": Family("phimoe", {**_LOCAL, "sliding_window": 48}, mechanisms="windows, experts"),
    "qwen2_moe": Family(
        "qwen2_moe", {**_MOE, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]}, path="layers", mechanisms="experts"
    ),
    "qwen3_5 (text)": Family("qwen3_5_text", _DELTA, path="layers", mechanisms="recurrent states"),
    "qwen3_5_moe (text)": Family(
        "qwen3_5_moe_text",
        {**_DELTA, **_MOE, "shared_expert_intermediate_size": 64},
        path="layers",
        mechanisms="recurrent states, experts",
    ),
    "qwen3_next": Family(
        "qwen3_next", {**_DELTA, **_MOE, "shared_expert_intermediate_size": 64}, path="layers", mechanisms="recurrent states, experts"
    ),
    "qwen3_moe": Family("qwen3_moe", {**_MOE, "head_dim": 32, "norm_topk_prob": True}, path="layers", mechanisms="experts"),
    "seed_oss": Family("seed_oss", _HEADS, path="native"),
    "smollm3": Family("smollm3", path="native"),
    "smollm3 without ropes": Family("smollm3", {"num_hidden_layers": 4}, path="native"),
    "solar_open": Family("solar_open", {**_HEADS, **_ROUTED, **_GROUPS}, path="layers", mechanisms="experts"),
    "stablelm": Family("stablelm", path="native"),
    "stablelm in parallel": Family("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}, path="native"),
    "starcoder2": Family("starcoder2", {"sliding_window": 64}, path="native", mechanisms="windows"),
    "vaultgemma": Family(
        "vaultgemma",
        {**_GEMMA, "attn_logit_softcapping": 5.0},
        "native",
        "windows and full attention, soft-capped scores, soft-capped logits",
    ),
    "youtu": Family("youtu", _LATENT, path="layers", mechanisms="latents"),
    "zamba2": Family(
        "zamba2",
        {
            **_ZAMBA2,
            "num_hidden_layers": 7,
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid", "hybrid", "linear_attention"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
        },
        path="layers",
        mechanisms="recurrent states, tied head",
    ),
    "zamba2 with one block": Family("zamba2", _ZAMBA2, path="layers", mechanisms="recurrent states, tied head"),
    "tied qwen2": Family("qwen2", {"tie_word_embeddings": True}, "native", mechanisms="tied head"),
    "lfm2": Family(
        "lfm2",
        {"num_hidden_layers": 4, "full_attn_idxs": [2], "block_multiple_of": 16},
        path="layers",
        mechanisms="recurrent states",
    ),
    "lfm2_moe": Family(
        "lfm2_moe",
        {**_MOE, "num_hidden_layers": 3, "num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention"]},
        path="layers",
        mechanisms="recurrent states, experts",
    ),
    "linear rope": Family("llama", _rope("linear", factor=4.0), "native", mechanisms="linear rope"),
    "yarn rope": Family("qwen3", _rope("yarn", factor=32.0, original_max_position_embeddings=ORIGINAL), "native", mechanisms="yarn rope"),
    "llama3 rope": Family(
        "llama",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL),
        "native",
        mechanisms="llama3 rope",
    ),
    "dynamic rope": Family("llama", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 400}, "native", mechanisms="dynamic rope"),
    "longrope": Family(
        "phi3",
        {
            **_rope(
                "longrope",
                original_max_position_embeddings=ORIGINAL,
                short_factor=[1 + place / 10 for place in range(8)],
                long_factor=[2 + place / 2 for place in range(8)],
            ),
            "pad_token_id": 0,
            "original_max_position_embeddings": ORIGINAL,
        },
        "native",
        mechanisms="longrope",
    ),
}
UNDIVIDED: Final = frozenset(
    """bitnet; ctrl; dbrx; flex_olmo; granitemoe_swa; jetmoe; mimo_v2_flash; modernbert-decoder; olmoe, clipped; opt with norms after;
    zamba2; zamba2 with one block""".replace("\n    ", " ").split("; ")
)
"""Those whose weights cannot be divided over ranks: Zamba 2, whose layers share blocks, and transformers' classes whose plan is missing or
not supported.
"""
_INTERFACE: Final = "does not use transformers' attention interface"
_STATE: Final = "recurrent layers without a definition of our own are not served"
_INDEXER: Final = "tokens that an indexer chooses"
_INDEXED: Final = {**_ROUTED, **_LATENT, **_GROUPS, "index_head_dim": 16, "index_n_heads": 2}
_TWICE: Final = "attends twice in one pass"


def _refused(reason: str, **settings: Mapping[str, Any]) -> dict[str, Refused]:
    """Return families that are refused for one reason: model type -> settings of its small config."""
    return {kind: Refused(kind, reason, each) for kind, each in settings.items()}


REFUSED: Final[Mapping[str, Refused]] = {
    **_refused(
        _INTERFACE,
        bailing_hybrid={**_MOE, **_HEADS, **_LATENT, **_SHARED},
        biogpt={},
        bloom={"n_layer": 2, "n_head": 4},
        codegen={**_GPT2, "rotary_dim": 8},
        cpmant={"dim_head": 16, "dim_ff": 128},
        falcon={},
        gpt_neo={"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 48},
        gpt_neox_japanese={},
        gptj={**_GPT2, "rotary_dim": 8},
        mpt={"d_model": 64, "n_heads": 4, "n_layers": 2},
        rwkv={"attention_hidden_size": 64},
        stablelm={"qk_layernorm": True},
        xglm={"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 128},
        xlstm={"num_heads": 4, "num_blocks": 2},
    ),
    **_refused(
        _STATE,
        lfm3={},
        minimax={**_LOCAL, **_HEADS, **_LINEAR},
        recurrent_gemma={"lru_width": 64},
    ),
    **_refused(
        _INDEXER,
        axk2={**_ROUTED, **_LATENT, **_GROUPS},
        deepseek_v32=_INDEXED,
        deepseek_v4={**_HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24},
        dots3_note_text={**_ROUTED, **_LATENT},
        glm_moe_dsa=_INDEXED,
    ),
    **_refused(_TWICE, diffllama={}, hrm_text={}),
    **_refused("makes a mask of its own", doge={}),
    "llama with a classifier's head": Refused("llama", "only encoders' heads are served", {"num_labels": 1}),
    **_refused(
        "layers of type 'minimax_m3_sparse'",
        minimax_m3_vl_text={
            **_HEADS,
            **_LOCAL,
            "rotary_dim": 8,
            "shared_intermediate_size": 64,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_head_dim": 16,
            "index_n_heads": 2,
        },
    ),
    **_refused(
        "layers of type 'hybrid'",
        zaya={
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "router_hidden_size": 32,
            "head_dim": 16,
        },
    ),
}


def list_families() -> list[dict[str, str]]:
    """Return a row for each family that is served: family, model_type, mechanisms, path and compared, the text parts of others included."""
    rows: list[tuple[str, ...]] = [
        (name, each.model_type, each.mechanisms, each.path, "one device" if name in UNDIVIDED else "every setting")
        for name, each in SERVED.items()
    ]
    rows += [(name, name, f"as {kind}", "", "text part") for name, kind in sorted(WRAPPERS.items())]
    rows += [(name, name, f"as {kind}", "", "checkpoint") for name, kind in PLAIN.items() if not name.endswith("_text")]
    rows += [(name, name, "", "encoder", "vectors and classes") for name in ENCODERS]
    return [dict(zip(("family", "model_type", "mechanisms", "path", "compared"), row, strict=True)) for row in rows]


def list_refused() -> list[dict[str, str]]:
    """Return a row for each family that is refused: family and reason."""
    return [{"family": name, "reason": each.reason} for name, each in sorted(REFUSED.items())]
