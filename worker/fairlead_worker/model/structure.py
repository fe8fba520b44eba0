"""Structure of a decoder-only transformers model, as data that a kernel can run: recognised by its parts, not by its family.

Names of children give a part's position; calling a norm, an activation or a rotary embedding shows what it computes. An unrecognised
part raises UnknownStructure. A wrong match is detected by `execution.check`, which compares logits.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from fairlead_worker.kernels.base import LayerSpec
from fairlead_worker.model.fuse import Slice, Stack
from fairlead_worker.model.norm import read_norm


class UnknownStructure(Exception):
    """An unrecognised part; the message names it."""


@dataclass(frozen=True, slots=True)
class Norm:
    """x / sqrt(mean(x²) + eps) * weight."""

    weight: torch.Tensor
    """[width] float32, including Gemma's + 1."""
    eps: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. Linear layers are the model's own modules."""

    before_attention: Norm
    qkv: nn.Module
    query_norm: Norm | None
    """[key_dim], for each head."""
    key_norm: Norm | None
    out: nn.Module
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: nn.Module
    activation: str
    down: nn.Module
    after_mlp: Norm | None
    rope: int
    """Index in `Decoder.ropes`."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model."""

    embed: nn.Module
    layers: tuple[Layer, ...]
    ropes: tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], ...]
    """Each: positions -> cosines and sines [positions, half] float32; the first 2 * half dimensions of a head are rotated."""
    final: Norm
    head: nn.Module
    softcap: float | None
    """Logits become `softcap * tanh(logits / softcap)`."""


LAYOUTS: dict[frozenset[str], dict[str, str]] = {
    frozenset({"input_layernorm", "post_attention_layernorm"}): {
        "before_attention": "input_layernorm",
        "before_mlp": "post_attention_layernorm",
    },
    frozenset({"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}): {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
"""The names of all norms of a layer -> the position of each. The first entry is Llama and most others, the second Gemma 2 and 3."""
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@torch.inference_mode()
def recognise(model: PreTrainedModel, specs: tuple[LayerSpec, ...]) -> Decoder:
    """Return the parts of `model`, whose attention layers are `specs`. Raises UnknownStructure."""
    base = model.base_model
    top = _children(model, {model.base_model_prefix, "lm_head"})
    parts = _children(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    layers = list(parts["layers"].children())
    if len(layers) != len(specs):
        raise UnknownStructure(f"{len(layers)} layers, of which {len(specs)} attend")
    typed = by_type(parts["rotary_emb"])
    kinds = [_layer_type(layer) if typed else None for layer in layers]
    distinct = list(dict.fromkeys(kinds))
    return Decoder(
        embed=parts["embed_tokens"],
        layers=tuple(_layer(layer, spec, distinct.index(kind)) for layer, spec, kind in zip(layers, specs, kinds, strict=True)),
        ropes=tuple(rope_tables(parts["rotary_emb"], kind) for kind in distinct),
        final=_norm(parts["norm"]),
        head=top["lm_head"],
        softcap=getattr(model.config, "final_logit_softcapping", None),
    )


def _layer(layer: nn.Module, spec: LayerSpec, rope: int) -> Layer:
    names = frozenset(name for name, _ in _stateful(layer)) - {"self_attn", "mlp"}
    if names not in LAYOUTS:
        raise UnknownStructure(f"{type(layer).__name__} with {', '.join(sorted(names))}")
    norms = {place: _norm(layer.get_submodule(name)) for place, name in LAYOUTS[names].items()}
    attention = _children(layer.get_submodule("self_attn"), {"qkv_proj", "o_proj"}, {"q_norm", "k_norm"})
    mlp = _children(layer.get_submodule("mlp"), {"gate_up_proj", "down_proj"})
    query, key = (_norm(attention[name], spec.key_dim) if name in attention else None for name in ("q_norm", "k_norm"))
    return Layer(
        before_attention=norms["before_attention"],
        qkv=_unstack(attention["qkv_proj"], [spec.heads * spec.key_dim, spec.kv_heads * spec.key_dim, spec.kv_heads * spec.value_dim]),
        query_norm=query,
        key_norm=key,
        out=attention["o_proj"],
        after_attention=norms.get("after_attention"),
        before_mlp=norms["before_mlp"],
        gate_up=_unstack(mlp["gate_up_proj"], None),
        activation=_activation(layer.get_submodule("mlp")),
        down=mlp["down_proj"],
        after_mlp=norms.get("after_mlp"),
        rope=rope,
    )


def _stateful(parent: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Return the children with weights; slices of a stack do not count."""
    harmless = (Slice, nn.Dropout, nn.Identity)
    return [(name, child) for name, child in parent.named_children() if not isinstance(child, harmless) and not _stateless(child)]


def _stateless(module: nn.Module) -> bool:
    """Return whether the module has no weights of any kind, packed ones included, as an activation."""
    return not any(isinstance(value, torch.Tensor) for part in module.modules() for value in _values(part))


def _values(module: nn.Module) -> Iterable[object]:
    return [*vars(module).values(), *module._parameters.values(), *module._buffers.values()]


def _children(parent: nn.Module, needed: set[str], optional: set[str] | None = None) -> dict[str, nn.Module]:
    found = dict(_stateful(parent))
    if missing := needed - found.keys():
        raise UnknownStructure(f"{type(parent).__name__} has no {', '.join(sorted(missing))}")
    if strange := found.keys() - needed - (optional or set()):
        raise UnknownStructure(f"{type(parent).__name__} has {', '.join(sorted(strange))} too")
    return found


def _unstack(module: nn.Module, sizes: list[int] | None) -> nn.Module:
    """Return the one linear layer, from our own stack or the model's own."""
    if not isinstance(module, Stack):
        return module
    if sizes and module.sizes != sizes:
        raise UnknownStructure(f"projections of {module.sizes} outputs where {sizes} are attended to")
    return module.linear


def _norm(module: nn.Module, width: int | None = None) -> Norm:
    form = read_norm(module)
    if form is None:
        raise UnknownStructure(f"{type(module).__name__} is not a root mean square norm")
    weight = module.get_parameter("weight").float()
    if width not in (None, len(weight)):
        raise UnknownStructure(f"{type(module).__name__} over {len(weight)} dimensions, not over a head's {width}")
    return Norm((weight + form.plus_one).contiguous(), form.eps)


def _activation(mlp: nn.Module) -> str:
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    if not callable(function):
        raise UnknownStructure(f"{type(mlp).__name__} has no act_fn")
    x = torch.linspace(-8, 8, 1001)
    for name, candidate in ACTIVATIONS.items():
        if torch.allclose(function(x), candidate(x), atol=1e-6):
            return name
    raise UnknownStructure(f"the activation {type(function).__name__}")


def by_type(rotary: nn.Module) -> bool:
    """Return whether layers of different types have their own rotary angles."""
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _layer_type(layer: nn.Module) -> str:
    kind = getattr(layer.get_submodule("self_attn"), "layer_type", None)
    if not isinstance(kind, str):
        raise UnknownStructure(f"{type(layer).__name__} does not say of which layer_type it is")
    return kind


def rope_tables(rotary: nn.Module, kind: str | None) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Return tables as in `Decoder.ropes`, for layers of type `kind`, on the CPU. Raises UnknownStructure."""
    arguments = {} if kind is None else {"layer_type": kind}
    # A copy: ropes that depend on the length store what they compute, and a model on a GPU would keep it on the host.
    with torch.inference_mode(False):  # they store it outside of inference, too
        rotary = copy.deepcopy(rotary)

    def tables(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        cosines, sines = rotary(torch.zeros(1), position_ids=torch.arange(positions)[None], **arguments)
        half = cosines.shape[-1] // 2
        for table in (cosines, sines):
            if table.dtype != torch.float32 or not torch.equal(table[..., :half], table[..., half:]):
                raise UnknownStructure(f"{type(rotary).__name__} does not turn halves of a head in float32")
        return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    tables(8)
    return tables
