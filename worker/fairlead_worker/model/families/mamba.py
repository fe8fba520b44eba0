"""Decoders with Mamba 2 layers (Dao and Gu 2024): alone, beside layers with attention, or beside attention in each layer."""

from functools import partial
from typing import Any

from fairlead_worker.model.definition import Definition, NormNames, Recurrence
from fairlead_worker.model.families.experts import make_experts
from fairlead_worker.model.families.granite import granite, make_shared
from fairlead_worker.model.layers.mamba2 import Mamba2, Mamba2Shape
from fairlead_worker.model.layers.mlp import GatedMlp
from fairlead_worker.model.layers.norm import RmsNorm

BAMBA = NormNames(before_attention="input_layernorm", before_mlp="pre_ff_layernorm")


def mamba2(config: Any) -> Definition:
    shape = make_shape(config, config.num_heads, config.head_dim, config.state_size, tuple(config.time_step_limit))
    return Definition.without_attention(
        config,
        make_norm=partial(RmsNorm, eps=config.layer_norm_epsilon),
        norms=NormNames(before_attention="norm"),
        embedding_name="embeddings",
        norm_name="norm_f",
        wide_residual=config.residual_in_fp32,
        recurrence=Recurrence("mixer", (True,) * config.num_hidden_layers, lambda _, index: Mamba2(shape, index)),
    )


def bamba(config: Any) -> Definition:
    """A part of each head is rotated (Chu et al. 2024)."""
    return Definition.read(
        config,
        norms=BAMBA,
        norm_name="final_layernorm",
        mlp_name="feed_forward",
        partial_rope=True,
        recurrence=_recurrence(config),
    )


def granite_hybrid(config: Any) -> Definition:
    """Granite 4: an MLP beside the experts, or alone; mostly without positions (IBM 2025)."""
    shared = make_shared(config)
    different: dict[str, Any] = {"mlp_name": "shared_mlp", "make_mlp": lambda _: shared()}
    if config.num_local_experts:
        different = {
            "mlp_name": "block_sparse_moe",
            "make_mlp": make_experts(config, "block_sparse_moe"),
            "shared_mlp": ("shared_mlp", shared),
        }
    ropes = ("" if config.position_embedding_type == "rope" else None,) * config.num_hidden_layers
    return granite(config, recurrence=_recurrence(config), ropes=ropes, **different)


def falcon_h1(config: Any) -> Definition | None:
    """Both in each layer, with factors of all that they read and write (TII 2025)."""
    if config.mamba_proj_bias or config.attention_bias:
        return None  # factors of inputs are taken of outputs here
    gate, down = config.mlp_multipliers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Definition.read(
        config,
        norms=BAMBA,
        norm_name="final_layernorm",
        mlp_name="feed_forward",
        make_mlp=lambda _: GatedMlp(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias, gate_factor=gate, down_factor=down
        ),
        scaling=head_dim**-0.5 * config.attention_in_multiplier**2 * config.key_multiplier,
        attention_scale=config.attention_in_multiplier * config.attention_out_multiplier,
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
        recurrence=_recurrence(
            config,
            beside=True,
            scale=config.ssm_out_multiplier,
            output_bias=config.projectors_bias,
            factors=tuple(config.ssm_in_multiplier * each for each in config.ssm_multipliers),
            norm=config.mamba_rms_norm,
            gate_after_norm=config.mamba_norm_before_gate,
        ),
    )


def make_shape(config: Any, heads: int, head_dim: int, state: int, limit: tuple[float, float]) -> Mamba2Shape:
    """Return the layers of a config with the names of Mamba 2."""
    return Mamba2Shape(
        width=config.hidden_size,
        heads=heads,
        head_dim=head_dim,
        state=state,
        groups=config.n_groups,
        convolution=config.conv_kernel,
        convolution_bias=config.use_conv_bias,
        bias=config.use_bias,
        output_bias=config.use_bias,
        eps=config.layer_norm_epsilon,
        limit=limit,
    )


def _recurrence(config: Any, beside: bool = False, scale: float = 1.0, **different: Any) -> Recurrence:
    """Return the Mamba 2 layers of a config with the names of Bamba. beside: all layers have attention, too."""
    inner = getattr(config, "mamba_d_ssm", None) or config.mamba_expand * config.hidden_size
    usual: dict[str, Any] = {
        "width": config.hidden_size,
        "heads": config.mamba_n_heads,
        "head_dim": inner // config.mamba_n_heads,
        "state": config.mamba_d_state,
        "groups": config.mamba_n_groups,
        "convolution": config.mamba_d_conv,
        "convolution_bias": config.mamba_conv_bias,
        "bias": config.mamba_proj_bias,
        "output_bias": config.mamba_proj_bias,
        "eps": config.rms_norm_eps,
        "limit": tuple(config.time_step_limit),
    }
    shape = Mamba2Shape(**(usual | different))
    layers = tuple(beside or kind == "linear_attention" for kind in config.layers_block_type)
    return Recurrence("mamba", layers, lambda _, index: Mamba2(shape, index), beside, scale)
