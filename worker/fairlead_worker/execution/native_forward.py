"""A step of the whole model in one native call (native/src/decoder.c): no Python between layers, one parallel region.

Norms, rope, activations and the residual sum are computed in float32. Inputs of linear layers, queries, keys and values have the model's
dtype. In bfloat16 this rounds less often than transformers does.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

import torch

from fairlead_worker.kernels.base import KVSpec, PackedStep, StepContext
from fairlead_worker.kernels.native import KINDS, NativeBackend, NativeStep
from fairlead_worker.model.structure import Decoder, Layer, Norm, UnknownStructure
from fairlead_worker.native import decoder as native
from fairlead_worker.native.linear import PANEL, NativeLinear
from fairlead_worker.native.memory import Arena
from fairlead_worker.native.memory import room as arena_room

FIRST_POSITIONS = 1024
FEW = 4
"""If the sampling tokens are at most 1 / FEW of all tokens, they go through the last layer's attention as independent rows."""


class NativeForward:
    """Implements `execution.forward.Forward` on the native backend."""

    can_score = True

    def __init__(self, decoder: Decoder, backend: NativeBackend, limit: int) -> None:
        """limit: positions of the longest request. Raises UnknownStructure if a part cannot run natively."""
        self._model = decoder
        self._decode = backend.library.fairlead_decode
        self._kind = KINDS[backend.spec.dtype]
        check_decoder(decoder, backend.spec, _packed_sizes)
        # Keep references: the structs hold addresses only.
        self._backend = backend
        specs = backend.spec.layers
        groups = backend.spec.groups or (0,) * len(specs)
        self._layers = (native.Layer * len(specs))(*map(_layer, decoder.layers, backend.layers, groups))
        self._ropes = (native.Rope * len(decoder.ropes))()
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._positions, self._limit = 0, limit
        self._reach(1)
        hidden = self._hidden = len(decoder.final.weight)
        self._decoder = native.Decoder(
            layers=ctypes.addressof(self._layers),
            count=len(specs),
            hidden=hidden,
            ropes=ctypes.addressof(self._ropes),
            head=_linear(decoder.head),
            final=_norm(decoder.final),
            kind=self._kind,
        )
        activations = backend.spec.dtype.itemsize
        attended = max(spec.heads * spec.value_dim for spec in specs)
        # Bytes per token, by field of `native.Pass`.
        self._widths = {
            "residual": 4 * hidden,
            "update": 4 * hidden,
            "normed": activations * hidden,
            "qkv": activations * max(_features(layer.qkv) for layer in decoder.layers),
            "attended": activations * attended,
            "sampled": 4 * hidden,
            "chosen": activations * attended,
            "asking": activations * hidden,
        }
        # Whether the last layer's queries fill whole panels.
        self._parts = specs[-1].heads * specs[-1].key_dim % PANEL == 0
        self._mlp_width = activations * max(_packed(layer.down).in_features for layer in decoder.layers)
        self._pass = native.Pass()
        self._scratch: dict[str, torch.Tensor] = {}
        self._tokens = 0

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return logits [S, vocabulary] in float32."""
        logits = torch.empty(len(step.sampling), _features(self._model.head))
        self._run(step, context, step.sampling, logits)
        return self._apply_softcap(logits)

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
        embedded = self._model.embed(step.tokens).contiguous()
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
        return self._apply_softcap(_packed(self._model.head).compute_float32(states))

    def _apply_softcap(self, logits: torch.Tensor) -> torch.Tensor:
        softcap = self._model.softcap
        return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)

    def _reach(self, positions: int) -> None:
        """Make rope tables for at least `positions` positions, with the model's own code. They double when they run out."""
        if positions <= self._positions:
            return
        # Stay within the limit: some embeddings change all frequencies when they see a longer text.
        reach = max(positions, min(self._limit, max(FIRST_POSITIONS, 1 << (positions - 1).bit_length())))
        made = [tables(reach) for tables in self._model.ropes]  # if memory runs out, the old tables stay
        for rope, (cosines, sines) in zip(self._ropes, made, strict=True):
            rope.cosine, rope.sine, rope.half = cosines.data_ptr(), sines.data_ptr(), cosines.shape[1]
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


class Sizes(NamedTuple):
    """What a linear layer takes and gives."""

    in_features: int
    out_features: int
    dtype: torch.dtype


def check_decoder(decoder: Decoder, spec: KVSpec, sizes_of: Callable[[torch.nn.Module], Sizes]) -> None:
    """Raise UnknownStructure unless the library can run `decoder`: each part must take the previous part's output size, as the library
    reads without bounds checks.

    Only sizes are read, so that weights may be on the meta device. sizes_of: of a linear layer; raises UnknownStructure for another one.
    """
    hidden = len(decoder.final.weight)
    halves = [tables(1)[0].shape[1] for tables in decoder.ropes]
    # Name, module, input size, output size (None: any).
    linears: list[tuple[str, torch.nn.Module, int, int | None]] = [("head", decoder.head, hidden, None)]
    norms, widths = [decoder.final], set[int]()
    for layer, of in zip(decoder.layers, spec.layers, strict=True):
        if 2 * halves[layer.rope] > of.key_dim:
            raise UnknownStructure(f"a rotary embedding of {2 * halves[layer.rope]} of a head's {of.key_dim} dimensions")
        inner = sizes_of(layer.down).in_features
        widths.add(inner)
        linears += [
            ("qkv", layer.qkv, hidden, of.heads * of.key_dim + of.kv_heads * (of.key_dim + of.value_dim)),
            ("out", layer.out, of.heads * of.value_dim, hidden),
            ("gate and up", layer.gate_up, hidden, 2 * inner),
            ("down", layer.down, inner, hidden),
        ]
        norms += [norm for norm in (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp) if norm]
    for name, module, inputs, outputs in linears:
        sizes = sizes_of(module)
        if (sizes.in_features, sizes.dtype) != (inputs, spec.dtype) or outputs not in (None, sizes.out_features):
            raise UnknownStructure(f"{name} is {module}, not {inputs} to {outputs or 'any'} in {spec.dtype}")
    if any(width % PANEL for width in widths):
        raise UnknownStructure(f"an MLP of {max(widths, key=lambda width: width % PANEL)} inner values, not a multiple of {PANEL}")
    if any(len(norm.weight) != hidden for norm in norms):
        raise UnknownStructure(f"norms over {sorted({len(norm.weight) for norm in norms})} dimensions, not over {hidden}")
    embedded = decoder.embed(torch.zeros(1, dtype=torch.int64, device=decoder.embed.weight.device))  # type: ignore[arg-type]  # a tensor's
    if (embedded.shape[-1], embedded.dtype) != (hidden, spec.dtype):
        raise UnknownStructure(f"an embedding of {embedded.shape[-1]} dimensions in {embedded.dtype}, not {hidden} in {spec.dtype}")


def _packed_sizes(module: torch.nn.Module) -> Sizes:
    linear = _packed(module)
    return Sizes(linear.in_features, linear.out_features, linear.dtype)


def _layer(layer: Layer, attention: ctypes.Structure, group: int) -> native.Layer:
    return native.Layer(
        before_attention=_norm(layer.before_attention),
        query=_norm(layer.query_norm),
        key=_norm(layer.key_norm),
        after_attention=_norm(layer.after_attention),
        before_mlp=_norm(layer.before_mlp),
        after_mlp=_norm(layer.after_mlp),
        qkv=_linear(layer.qkv),
        out=_linear(layer.out),
        gate_up=_linear(layer.gate_up),
        down=_linear(layer.down),
        attention=ctypes.addressof(attention),
        rope=layer.rope,
        activation=native.ACTIVATIONS.index(layer.activation),
        group=group,
    )


def _norm(norm: Norm | None) -> native.Norm:
    return native.Norm() if norm is None else native.Norm(norm.weight.data_ptr(), norm.eps)


def _linear(module: torch.nn.Module) -> int:
    return ctypes.addressof(_packed(module).native)


def _features(module: torch.nn.Module) -> int:
    return _packed(module).out_features


def _packed(module: torch.nn.Module) -> NativeLinear:
    if not isinstance(module, NativeLinear):
        raise UnknownStructure(f"a linear layer is not packed for it ({type(module).__name__})")
    return module
