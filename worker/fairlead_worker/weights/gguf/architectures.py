"""Architectures of GGUF files: their metadata as transformers' configuration, and their tensors' names in transformers."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fairlead_worker.weights.gguf.reader import Gguf, GgufError

Config = dict[str, Any]
MOST = 1 << 24
"""No size in a model's metadata is larger."""
LONG_ROPE = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_FACTORS = "rope_freqs.weight"
"""The divisors of the frequencies of Llama 3's rope."""

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {"attn_norm": "input_layernorm", "attn_output": "self_attn.o_proj"} | {
    f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"
}
_MLP = {"ffn_norm": "post_attention_layernorm"} | {f"ffn_{each}": f"mlp.{each}_proj" for each in ("gate", "up", "down")}
_HEAD_NORMS = {f"attn_{each}_norm": f"self_attn.{each}_norm" for each in "qk"}
_DENSE = _ATTENTION | _MLP
_QKV = frozenset(("attn_q", "attn_k", "attn_v"))
_SANDWICH = _DENSE | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"} | {
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


class Fields:
    """The metadata of a file, read by the architecture's own keys. Raises GgufError for what is missing or impossible."""

    def __init__(self, gguf: Gguf, architecture: str) -> None:
        self.gguf, self._architecture = gguf, architecture

    def get(self, name: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"{self._architecture}.{name}", default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
            raise self.error(name, value, f"a whole number from 1 to {MOST}, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, value, "a positive number")
        return float(value)

    def error(self, name: str, value: object, wanted: str) -> GgufError:
        shown = "is missing" if value is None else f"is {repr(value)[:40]}"
        return GgufError(self.gguf.path, f"{self._architecture}.{name} {shown} and must be {wanted}: convert the model again")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of `general.architecture` is read."""

    model_type: str
    model_class: str
    layer: Mapping[str, str]
    """Name of a tensor in a layer -> of the module in transformers."""
    settings: Callable[[Fields], Config] = lambda fields: {}
    """What its configuration has beside the common part."""
    interleaved: bool = False
    """Whether rows of q and k are in the order of Meta's rope, which turns neighbours, not halves of a head."""
    norms_with_one: bool = False
    """Whether norm weights contain the 1 that transformers adds."""
    biased: frozenset[str] = field(default_factory=frozenset)
    """Layers that may have a bias."""


def _llama(fields: Fields) -> Config:
    biased = "blk.0.attn_q.bias" in fields.gguf.tensors
    return {"hidden_act": "silu", "attention_bias": biased, "mlp_bias": False, "pretraining_tp": 1}


def _gemma(fields: Fields) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}


def _query_scale(fields: Fields, large: int) -> int:
    """Return `query_pre_attn_scalar`: the largest model of both families, of `large` layers, scales by another width."""
    if fields.integer("block_count") == large:
        return fields.integer("embedding_length") // fields.integer("attention.head_count")
    return head_size(fields)


def _gemma2(fields: Fields) -> Config:
    return _gemma(fields) | {
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scale(fields, large=46),
        "layer_types": _layer_types(fields, 2),
    }


def _gemma3(fields: Fields) -> Config:
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    softcap = fields.get("final_logit_softcapping")
    return _gemma(fields) | {
        "sliding_window": fields.integer("attention.sliding_window"),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": float(softcap) if softcap else None,
        "query_pre_attn_scalar": _query_scale(fields, large=62),
        "layer_types": _layer_types(fields, 6),
        "rope_parameters": {"full_attention": _rope(fields, 1e6), "sliding_attention": local},
    }


def _layer_types(fields: Fields, period: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(fields.integer("block_count"))]


def _phi3(fields: Fields) -> Config:
    turned = fields.integer("rope.dimension_count", head_size(fields)) / head_size(fields)
    window = fields.get("attention.sliding_window")
    original = fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))
    rope = _rope(fields) | {"partial_rotary_factor": turned}
    return {
        "hidden_act": "silu",
        "partial_rotary_factor": turned,
        "sliding_window": window or None,
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _DENSE, _llama, interleaved=True, biased=_QKV | {"attn_output"}),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _DENSE, lambda _: {"hidden_act": "silu"}, biased=_QKV),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _DENSE | _HEAD_NORMS, lambda _: {"hidden_act": "silu", "attention_bias": False}),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _FUSED, _phi3),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _DENSE, _gemma, norms_with_one=True),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _SANDWICH, _gemma2, norms_with_one=True),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _SANDWICH | _HEAD_NORMS, _gemma3, norms_with_one=True),
}
"""By `general.architecture`. Files of Mistral and SmolLM2 name llama."""


def architecture_of(gguf: Gguf) -> tuple[str, Architecture]:
    """Return the architecture and its name. Raises GgufError for an unknown one and for mixtures of experts."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise GgufError(
            gguf.path,
            f"general.architecture {repr(name)[:40]} is not supported from GGUF ({', '.join(ARCHITECTURES)} are): "
            "serve the model's safetensors",
        )
    if experts := gguf.metadata.get(f"{name}.expert_count"):
        raise GgufError(gguf.path, f"{name}.expert_count is {experts}: experts are not supported from GGUF, serve the model's safetensors")
    return name, ARCHITECTURES[name]


def head_size(fields: Fields) -> int:
    return fields.integer("attention.key_length", max(1, fields.integer("embedding_length") // fields.integer("attention.head_count")))


def _rope(fields: Fields, base: float = 10000.0) -> Config:
    """Return `rope_parameters`. Raises GgufError for an unknown scaling."""
    theta = {"rope_theta": fields.number("rope.freq_base", base)}
    if ROPE_FACTORS in fields.gguf.tensors:
        # Both lists are the same, so that this is one fixed divisor for each frequency, whatever the length of a text.
        factors = read_floats(fields.gguf, ROPE_FACTORS)
        length = fields.integer("context_length")
        fixed = {"factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": length}
        return theta | fixed | {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    if not fields.gguf.tensors.keys().isdisjoint(LONG_ROPE.values()):
        lists = {name: read_floats(fields.gguf, tensor) for name, tensor in LONG_ROPE.items()}
        original = fields.integer("rope.scaling.original_context_length")
        attention = fields.number("rope.scaling.attn_factor", 1.0)
        return theta | lists | {"rope_type": "longrope", "attention_factor": attention, "original_max_position_embeddings": original}
    kind = fields.get("rope.scaling.type") or ("linear" if fields.get("rope.scale_linear") else "none")
    if kind == "none":
        return theta | {"rope_type": "default"}
    factor = fields.number("rope.scaling.factor", fields.get("rope.scale_linear"))
    if kind == "linear":
        return theta | {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length")
        return theta | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise fields.error("rope.scaling.type", kind, "none, linear or yarn")


def read_floats(gguf: Gguf, name: str) -> list[float]:
    """Return a small F32 tensor. Raises GgufError for a missing one and for another type, and OSError."""
    import numpy

    if (tensor := gguf.tensors.get(name)) is None:
        raise GgufError(gguf.path, f"it has no tensor {name}: the file is incomplete, convert the model again")
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise GgufError(
            gguf.path, f"tensor {name} is {tensor.type} {list(tensor.shape)}, not F32 in one dimension: convert the model again"
        )
    values: list[float] = numpy.fromfile(tensor.path, numpy.float32, tensor.shape[0], offset=tensor.offset).tolist()
    return values


def make_config(gguf: Gguf) -> Config:
    """Return the content of config.json. Raises GgufError."""
    name, architecture = architecture_of(gguf)
    fields = Fields(gguf, name)
    layers, heads = fields.integer("block_count"), fields.integer("attention.head_count")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(gguf.path, "it has no matrix token_embd.weight: it is an adapter, a projector or a part of a model")
    present = {int(found[1]) for tensor in gguf.tensors if (found := re.match(r"blk\.([0-9]{1,5})\.", tensor))}
    if len(present) != layers or max(present) != layers - 1:
        raise GgufError(gguf.path, f"{name}.block_count is {layers}, and it has tensors of {len(present)} layers: convert the model again")
    if (hidden := fields.integer("embedding_length")) != embedding.shape[1]:
        raise fields.error("embedding_length", hidden, f"{embedding.shape[1]}, as token_embd.weight has")
    if (size := head_size(fields)) != fields.integer("attention.value_length", size):
        raise fields.error("attention.value_length", fields.get("attention.value_length"), f"{size}, as attention.key_length")
    if fields.integer("rope.dimension_count", size) != size and architecture.model_type != "phi3":
        raise fields.error("rope.dimension_count", fields.get("rope.dimension_count"), f"{size}, the size of a head")
    common = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model_class],
        "dtype": _dtype(gguf),
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": size,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    ids = {
        f"{token}_token_id": gguf.metadata.get(f"tokenizer.ggml.{key}_token_id")
        for token, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    further = architecture.settings(fields)
    if "rope_parameters" not in further:
        further["rope_parameters"] = _rope(fields)
    return common | ids | further


def _dtype(gguf: Gguf) -> str:
    """Return the dtype to compute in: of the type that holds most bytes, and bfloat16 for blocks."""
    held = Counter[str]()
    for tensor in gguf.tensors.values():
        held[tensor.type] += tensor.size
    return {"F32": "float32", "F16": "float16"}.get(held.most_common(1)[0][0], "bfloat16")


def module_of(architecture: Architecture, tensor: str) -> tuple[str, str] | None:
    """Return the module of a tensor in transformers, and weight or bias; None for one that is not known."""
    stem, _, kind = tensor.rpartition(".")
    if kind == "weight" and stem in _ENDS:
        return _ENDS[stem], kind
    found = re.fullmatch(r"blk\.([0-9]{1,5})\.(\w+)", stem)
    if (
        found is None
        or found[2] not in architecture.layer
        or not (kind == "weight" or (kind == "bias" and found[2] in architecture.biased))
    ):
        return None
    return f"model.layers.{found[1]}.{architecture.layer[found[2]]}", kind


def is_described(tensor: str) -> bool:
    """Return whether config.json has the numbers of a tensor."""
    return tensor == ROPE_FACTORS or tensor in LONG_ROPE.values()
