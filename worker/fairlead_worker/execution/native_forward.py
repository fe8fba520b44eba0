"""A step of the whole model in one native call (native/src/decoder.c): no Python between layers, one parallel region.

Norms, rope, activations and the residual sum are computed in float32. Inputs of linear layers, queries, keys and values have the model's
dtype. In bfloat16 this rounds less often than transformers does.
"""

import ctypes
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.ipc.messages import DecoderPath
from fairlead_worker.kernels.base import KVSpec, PackedStep, StepContext
from fairlead_worker.kernels.native import KINDS, NativeBackend, NativeStep
from fairlead_worker.model.decoder import Decoder, DecoderLayer
from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.mlp import GatedMlp, PlainMlp, Xielu
from fairlead_worker.model.layers.norm import LayerNorm, RmsNorm
from fairlead_worker.model.layers.rotary import Rope
from fairlead_worker.model.layers.stack import Stack
from fairlead_worker.native import decoder as native
from fairlead_worker.native.linear import PANEL, Linear, NativeLinear
from fairlead_worker.native.memory import Arena
from fairlead_worker.native.memory import room as arena_room

FIRST_POSITIONS = 1024
FEW = 4
"""If the sampling tokens are at most 1 / FEW of all tokens, they go through the last layer's attention as independent rows."""
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "xielu": "xielu",
}
"""Name in a config -> in `native.decoder.ACTIVATIONS`."""


class NotNative(Exception):
    """What the native library does not compute; the message names it."""


class NativeForward:
    """Implements `execution.forward.Forward` on the native backend, from a decoder's definition and its layers."""

    can_score = True
    path: DecoderPath = "native"

    def __init__(self, model: PreTrainedModel, backend: NativeBackend, limit: int) -> None:
        """limit: positions of the longest request. Raises NotNative if a part cannot run natively."""
        self._model, matrices, self._head = check_decoder(model, backend.spec)
        self._decode = backend.library.fairlead_decode
        self._kind = KINDS[backend.spec.dtype]
        body, specs = self._model.model, backend.spec.layers
        hidden = self._hidden = self._model.definition.width
        identity = Rope(torch.empty(0))
        kinds = list(dict.fromkeys(self._model.definition.ropes))
        self._rotations = [identity if kind is None else body.ropes[kind] for kind in kinds]
        # Keep references: the structs hold addresses only.
        self._backend, self._kept = backend, list[Any]()
        self._layers = (native.Layer * len(specs))(
            *(
                self._layer(layer, linears, attention, kinds.index(layer.rope), group)
                for layer, linears, attention, group in zip(
                    self._model.layers, matrices, backend.layers, backend.spec.groups or (0,) * len(specs), strict=True
                )
            )
        )
        self._ropes = (native.Rope * len(kinds))()
        self._tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._positions, self._limit = 0, limit
        self._reach(1)
        self._decoder = native.Decoder(
            layers=ctypes.addressof(self._layers),
            count=len(specs),
            hidden=hidden,
            ropes=ctypes.addressof(self._ropes),
            head=ctypes.addressof(self._head.native),
            final=self._norm(body.last_norm, hidden),
            kind=self._kind,
        )
        activations = backend.spec.dtype.itemsize
        attended = max(spec.heads * spec.value_dim for spec in specs)
        # Bytes per token, by field of `native.Pass`.
        self._widths = {
            "residual": 4 * hidden,
            "update": 4 * hidden,
            "normed": activations * hidden,
            "qkv": activations * max(linears.qkv.out_features for linears in matrices),
            "attended": activations * attended,
            "sampled": 4 * hidden,
            "chosen": activations * attended,
            "asking": activations * hidden,
        }
        # Whether the last layer's queries fill whole panels.
        self._parts = specs[-1].heads * specs[-1].key_dim % PANEL == 0
        self._mlp_width = activations * max(linears.down.in_features for linears in matrices)
        self._pass = native.Pass()
        self._scratch: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return logits [S, vocabulary] in float32."""
        logits = torch.empty(len(step.sampling), self._head.out_features)
        self._run(step, context, step.sampling, logits)
        return self._model.finish(logits)

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> "tuple[torch.Tensor, _NativeStates]":
        """Keep the body's outputs at `places` and `step.sampling`; the head then runs on some of them at a time."""
        chosen = torch.cat((places, step.sampling))
        self._run(step, context, chosen, None)
        kept = self._scratch["normed"].view(self._backend.spec.dtype)[: len(chosen) * self._hidden].view(-1, self._hidden).clone()
        return self.head(kept[len(places) :]), _NativeStates(self, kept[: len(places)])

    def _run(self, step: PackedStep, context: StepContext, sampling: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Run the whole model.

        Without `logits` the head is skipped, and the final norm's outputs for `sampling` stay in scratch memory.
        """
        assert isinstance(context, NativeStep)
        tokens, samples = len(step.tokens), len(sampling)
        self._reach(max(map(add, step.starts, step.counts)))
        self._reserve(max(tokens, samples))
        embedded = self._model.model.embed(step.tokens, step.positions).contiguous()
        run = self._pass
        run.steps, run.embedded = ctypes.addressof(context.native), embedded.data_ptr()
        run.logits = None if logits is None else logits.data_ptr()
        run.positions, run.sampling, run.samples = step.positions.data_ptr(), sampling.data_ptr(), samples
        run.last = run.last_positions = None
        if self._parts and samples * FEW <= tokens:
            alone, positions = context.single_token_rows(sampling), step.positions[sampling]
            run.last, run.last_positions = ctypes.addressof(alone.native), positions.data_ptr()
        self._decode(ctypes.c_int32(torch.get_num_threads()), ctypes.byref(self._decoder), ctypes.byref(run))

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return [n, hidden] -> [n, vocabulary] in float32, as the decoder computes them."""
        return self._model.finish(self._head.compute_float32(states))

    def _reach(self, positions: int) -> None:
        """Make rope tables for at least `positions` positions. They double when they run out."""
        if positions <= self._positions:
            return
        reach = max(positions, min(self._limit, max(FIRST_POSITIONS, 1 << (positions - 1).bit_length())))
        made = [_tables(rope, reach) for rope in self._rotations]  # if memory runs out, the old tables stay
        for struct, rope, tables in zip(self._ropes, self._rotations, made, strict=True):
            struct.cosine, struct.sine, struct.growth = (None if table is None else table.data_ptr() for table in tables)
            struct.half, struct.neighbours = len(rope.frequencies), rope.interleaved
            struct.before_norms = self._model.definition.rotates_first
        self._positions, self._tables = reach, made

    def _reserve(self, tokens: int) -> None:
        """Reserve scratch memory for `tokens` tokens: once for the largest step so far, in powers of two.

        It uses huge pages: the first step of 2,000 tokens would fault 6,000 small pages.
        """
        if tokens <= self._tokens:
            return
        room = max(16, 1 << (tokens - 1).bit_length())
        sizes = {name: room * width for name, width in self._widths.items()}
        sizes["gated"] = min(room, native.MLP_ROWS) * self._mlp_width
        arena = Arena(sum(map(arena_room, sizes.values())))
        self._scratch = {name: arena.take(size) for name, size in sizes.items()}
        self._tokens = room
        for name, memory in self._scratch.items():
            setattr(self._pass, name, memory.data_ptr())

    def _layer(self, layer: DecoderLayer, linears: "Matrices", attention: ctypes.Structure, rope: int, group: int) -> native.Layer:
        definition, attends, width = layer.definition, layer.attention, self._hidden
        before_attention, after_attention, before_mlp, after_mlp = map(layer.norm_of, definition.norms)
        _, query, key = attends.parts
        spec, added = attends.spec, definition.residual_scale
        return native.Layer(
            before_attention=self._norm(before_attention, width),
            query=self._norm(query, spec.heads * spec.key_dim),
            key=self._norm(key, spec.kv_heads * spec.key_dim),
            after_attention=self._norm(after_attention, width, added),
            before_mlp=self._norm(before_mlp, width),
            after_mlp=self._norm(after_mlp, width, added),
            qkv=self._linear(linears.qkv),
            out=self._linear(linears.out, definition.attention_scale * (1 if after_attention else added)),
            gate_up=self._linear(linears.gate_up),
            down=self._linear(linears.down, 1 if after_mlp else added),
            attention=ctypes.addressof(attention),
            rope=rope,
            activation=_activation(definition.activation, layer.mlp_or_experts),
            gated=linears.gated,
            parallel=definition.parallel,
            group=group,
        )

    def _norm(self, module: nn.Module | None, width: int, factor: float = 1) -> native.Norm:
        """Return a norm of `width` values, in which several heads may have one weight; None: there is none.

        Its weight is widened, and contains Gemma's 1 and the `factor`.
        """
        if module is None:
            return native.Norm()
        norm = _check_norm(module)
        size = _width(norm)
        weight, bias = torch.ones(size), torch.zeros(size)
        if norm.weight is not None:
            weight = norm.weight.detach().float() + norm.plus_one
        if isinstance(norm, LayerNorm) and norm.bias is not None:
            bias = norm.bias.detach().float()
        values = [(part * factor).flatten().repeat(width // part.numel()) for part in (weight, bias)]
        self._kept += values
        kind = native.AROUND_MEAN if isinstance(norm, LayerNorm) else native.ROOT_MEAN_SQUARE
        return native.Norm(values[0].data_ptr(), values[1].data_ptr(), size, norm.eps, kind)

    def _linear(self, linear: NativeLinear, factor: float = 1) -> int:
        """Return the address of `linear`, whose outputs are multiplied by `factor`: the library has a scale of each output anyway."""
        if factor == 1:
            return ctypes.addressof(linear.native)
        scales = torch.full((linear.out_features,), factor) if linear.scales is None else linear.scales * factor
        bias = None if linear.bias is None else linear.bias * factor
        struct = Linear.from_buffer_copy(linear.native)
        struct.scales, struct.bias = scales.data_ptr(), None if bias is None else bias.data_ptr()
        self._kept += [scales, bias, struct]
        return ctypes.addressof(struct)


@dataclass(frozen=True, slots=True)
class _NativeStates:
    """Implements `execution.forward.HiddenStates`."""

    forward: NativeForward
    kept: torch.Tensor
    """[n, hidden]"""

    def logits(self, some: slice) -> torch.Tensor:
        return self.forward.head(self.kept[some])

    def states(self, some: slice) -> torch.Tensor:
        return self.kept[some]


class Matrices(NamedTuple):
    """Those of a layer."""

    qkv: Any
    out: Any
    gate_up: Any
    """Of up alone if not `gated`."""
    down: Any
    gated: bool


def check_decoder(model: PreTrainedModel, spec: KVSpec, kind: type[nn.Module] = NativeLinear) -> tuple[Decoder, list[Matrices], Any]:
    """Return `model`, the matrices of its layers and its head, if the library computes what its definition says. Raises NotNative.

    Each part must take the previous part's output size: the library reads without bounds checks. Only sizes are read, so that weights
    may be on the meta device. kind: of the matrices: `NativeLinear`, or torch's of a model that is not packed.
    """
    if not isinstance(model, Decoder):
        raise NotNative("it runs by transformers' own code")
    _check_definition(model)
    layers = model.layers
    matrices, head = [_find_matrices(layer, kind) for layer in layers], _checked(model.lm_head, kind)
    _check_sizes(model, matrices, head, spec)
    for layer in layers:
        for name in filter(None, layer.definition.norms):
            _check_norm(layer.norm_of(name), model.definition.width)
        if isinstance(layer.attention, CausalAttention):
            attention, of = layer.attention, layer.attention.spec
            for norm, heads in zip(attention.parts[1:], (of.heads, of.kv_heads), strict=True):
                if norm is not None:
                    _check_norm(norm, of.key_dim * (heads if attention.head_norms == "all" else 1))
    _check_norm(model.model.last_norm, model.definition.width)
    return model, matrices, head


def _check_definition(model: Decoder) -> None:
    definition, ropes = model.definition, model.model.ropes.values()
    for what, it_has in {
        "latents": definition.latent is not None,
        "layers of its own": definition.make_layer is not None or definition.make_body is not None,
        "queries that grow in layers without positions": definition.plain_growth is not None,
        "recurrent layers": definition.recurrence is not None,
        "attention with gates": definition.gated,
        "a rope of more than a head's dimensions": any(2 * len(rope.frequencies) > definition.head_dim for rope in ropes),
        f"the activation {definition.activation}": definition.activation not in ACTIVATIONS,
    }.items():
        if it_has:
            raise NotNative(f"it has {what}")


def _find_matrices(layer: DecoderLayer, kind: type[nn.Module]) -> Matrices:
    mlp, whole = layer.mlp_or_experts, layer.attention.whole
    if not isinstance(mlp, GatedMlp | PlainMlp):
        raise NotNative(f"it has {type(mlp).__name__}, not an MLP")
    if layer.attention.by_head:
        raise NotNative("q, k and v of each head are side by side in quantized weights")
    qkv = whole.linear if isinstance(whole, Stack) else whole
    qkv, out, up, down = (_checked(matrix, kind) for matrix in (qkv, layer.attention.parts[0], *mlp.matrices))
    return Matrices(qkv, out, up, down, isinstance(mlp, GatedMlp))


def _checked(module: nn.Module | None, kind: type[nn.Module]) -> nn.Module:
    if not isinstance(module, kind):
        raise NotNative(f"a linear layer is not packed for it ({type(module).__name__})")
    return module


def _check_norm(module: nn.Module | None, width: int = 0) -> RmsNorm | LayerNorm:
    """Return the norm. width: of its values; 0: any."""
    if not isinstance(module, RmsNorm | LayerNorm):
        raise NotNative(f"it has {type(module).__name__}, not a root mean square or layer norm")
    if width and _width(module) != width:
        raise NotNative(f"it has a norm over {_width(module)} dimensions, not over {width}")
    return module


def _width(norm: RmsNorm | LayerNorm) -> int:
    if isinstance(norm, RmsNorm):
        return norm.width if norm.weight is None else len(norm.weight)
    return int(norm.normalized_shape[0])


def _activation(name: str, mlp: nn.Module) -> native.Activation:
    module = mlp.activation if isinstance(mlp, PlainMlp) else None
    factors = module.factors.tolist() if isinstance(module, Xielu) else ()
    return native.Activation(native.ACTIVATIONS.index(ACTIVATIONS[name]), *factors)


def _tables(rope: Rope, positions: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the tables of `native.Rope` for so many positions: cosines, sines and factors of queries."""
    places = torch.arange(positions)
    cosines, sines = rope.tables(places)
    if rope.interleaved:
        cosines, sines = cosines.repeat_interleave(2, -1), torch.stack((-sines, sines), -1).flatten(-2)
    return cosines, sines, None if rope.growth is None else rope.growth.at(places).flatten()


def _check_sizes(model: Decoder, layers: list[Matrices], head: Any, spec: KVSpec) -> None:
    hidden = model.definition.width
    # Name, matrix, input size, output size (None: any).
    linears: list[tuple[str, Any, int, int | None]] = [("head", head, hidden, None)]
    for layer, of in zip(layers, spec.layers, strict=True):
        inner = layer.down.in_features
        linears += [
            ("qkv", layer.qkv, hidden, of.heads * of.key_dim + of.kv_heads * (of.key_dim + of.value_dim)),
            ("out", layer.out, of.heads * of.value_dim, hidden),
            ("gate and up" if layer.gated else "up", layer.gate_up, hidden, inner * (1 + layer.gated)),
            ("down", layer.down, inner, hidden),
        ]
    for name, linear, inputs, outputs in linears:
        dtype = linear.weight.dtype if isinstance(linear, nn.Linear) else linear.dtype
        if (linear.in_features, dtype) != (inputs, spec.dtype) or outputs not in (None, linear.out_features):
            raise NotNative(f"{name} is {linear}, not {inputs} to {outputs or 'any'} in {spec.dtype}")
    if odd := [layer.down.in_features for layer in layers if layer.gated and layer.down.in_features % PANEL]:
        raise NotNative(f"it has an MLP of {odd[0]} inner values, not a multiple of {PANEL}")
    first = torch.zeros(1, dtype=torch.int64, device=model.device)
    embedded = model.model.embed(first, first)
    if (embedded.shape[-1], embedded.dtype) != (hidden, spec.dtype):
        raise NotNative(f"it has an embedding of {embedded.shape[-1]} dimensions in {embedded.dtype}, not {hidden} in {spec.dtype}")
