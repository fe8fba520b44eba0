"""Our own decoder: computes what the `Definition` of a family says by torch over packed rows. The native library is built from it too.

Its modules have the names of transformers' checkpoints, so that transformers' loader reads every format into it, and adapters find their
layers.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutput

from fairlead_worker.kernels.base import LayerSpec, StepContext
from fairlead_worker.kernels.states import StateSpec
from fairlead_worker.model.definition import Definition
from fairlead_worker.model.layers.causal import CausalAttention
from fairlead_worker.model.layers.latent import LatentAttention
from fairlead_worker.model.layers.mlp import GatedMlp, PlainMlp
from fairlead_worker.model.layers.rotary import Rope, StepRotation
from fairlead_worker.model.layers.stack import Projections
from fairlead_worker.model.rope import find_frequencies


class DecoderLayer(nn.Module):
    """Attention, a recurrent part or both, and an MLP; or only one of these. The norms that follow add their outputs to the residual."""

    def __init__(self, definition: Definition, index: int) -> None:
        super().__init__()
        self.definition, self.rope = definition, definition.ropes[index]
        if definition.has_attention(index):
            place = sum(map(definition.has_attention, range(index)))
            self._modules[definition.attention_name] = make_attention(definition, index, place)  # GPT-NeoX calls it as the property here
        if (recurrence := definition.recurrence) is not None and definition.is_recurrent(index):
            self.add_module(recurrence.name, recurrence.make(index, sum(map(definition.is_recurrent, range(index)))))
        self.attends, self.recurs = definition.has_attention(index), definition.is_recurrent(index)
        mlp = definition.make_mlp(index) if definition.make_mlp else make_mlp(definition)
        self.feeds = mlp is not None
        if mlp is not None:
            self.add_module(definition.mlp_name, mlp)
            if definition.shared_mlp is not None:
                name, make = definition.shared_mlp
                self.add_module(name, make())
        for name in filter(None, definition.norms):
            self.add_module(name, definition.make_norm(definition.width))

    @property
    def attention(self) -> Any:
        """Return its `CausalAttention`; it has one if `attends`."""
        return self._modules[self.definition.attention_name]

    @property
    def recurrent(self) -> Any:
        """Return its recurrent part; it has one if `recurs`."""
        assert self.definition.recurrence is not None
        return self.get_submodule(self.definition.recurrence.name)

    @property
    def mlp_or_experts(self) -> nn.Module:
        module = self._modules[self.definition.mlp_name]
        assert module is not None
        return module

    def norm_of(self, name: str) -> nn.Module | None:
        """Return the norm of a name in `NormNames`; None if the name is empty."""
        return self._modules[name] if name else None

    def forward(
        self, normed: torch.Tensor, residual: torch.Tensor, rotation: StepRotation | None, context: StepContext, following: nn.Module | None
    ) -> torch.Tensor:
        """Return what the next layer reads, [T, width]: `following`, the norm that begins it, of the new residual.

        normed: the norm that begins this layer, of `residual` [T, width], which is changed in place.
        """
        names, scale = self.definition.norms, self.definition.residual_scale
        if not (self.attends or self.recurs):
            return add_norm(self._feed(normed), residual, following, scale)
        update = self._mix(normed, rotation, context)
        if self.definition.parallel:
            own = self.norm_of(names.before_mlp)
            return add_norm(update + self._feed(normed if own is None else own(residual)), residual, following, scale)
        if (after := self.norm_of(names.after_attention)) is not None:
            update = after(update)
        if not self.feeds:
            return add_norm(update, residual, following, scale)
        update = self._feed(add_norm(update, residual, self.norm_of(names.before_mlp), scale))
        if (after := self.norm_of(names.after_mlp)) is not None:
            update = after(update)
        return add_norm(update, residual, following, scale)

    def _mix(self, normed: torch.Tensor, rotation: StepRotation | None, context: StepContext) -> torch.Tensor:
        """Return the output of attention, of the recurrent part, or the sum of both."""
        update: torch.Tensor | None = None
        if self.attends:
            update = _scaled(self.attention(normed, rotation, context), self.definition.attention_scale)
        if (recurrence := self.definition.recurrence) is not None and self.recurs:
            other = _scaled(self.recurrent(normed, context), recurrence.scale)
            update = other if update is None else update + other
        assert update is not None, "it has one of them"
        return update

    def _feed(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, or of transformers' experts, which take [1, T, width] and may also return their routes."""
        mlp = self.mlp_or_experts
        if isinstance(mlp, GatedMlp | PlainMlp):
            out: torch.Tensor = mlp(states)
        else:
            answer = mlp(states[None])
            out = (answer[0] if isinstance(answer, tuple) else answer).view(states.shape)
        if self.definition.shared_mlp is not None:
            out = out + getattr(self, self.definition.shared_mlp[0])(states)
        return out


def make_attention(definition: Definition, index: int, place: int) -> CausalAttention | LatentAttention:
    """Return the attention of the layer with the number `index`. place: among those with attention."""
    if definition.latent is not None:
        return LatentAttention(definition.width, place, definition.spec(index), definition.latent, definition.bias)
    return CausalAttention(
        definition.width,
        place,
        definition.spec(index),
        definition.make_norm,
        bias=definition.bias,
        output_bias=definition.output_bias,
        stacked=definition.stacked,
        sinks=definition.sinks,
        head_norms="none" if definition.rotates_first and definition.ropes[index] is None else definition.head_norms,
        make_head_norm=definition.make_head_norm,
        rotates_first=definition.rotates_first,
        by_head=definition.by_head,
        gated=definition.gated,
        names=definition.attention_names,
    )


def make_mlp(definition: Definition) -> GatedMlp | PlainMlp:
    width, inner, activation, bias = definition.width, definition.inner, definition.activation, definition.mlp_bias
    if definition.plain_mlp is not None:
        return PlainMlp(width, inner, activation, bias, definition.plain_mlp)
    return GatedMlp(width, inner, activation, bias, definition.stacked or definition.stacked_mlp)


def add_norm(update: torch.Tensor, residual: torch.Tensor, norm: nn.Module | None, scale: float = 1.0) -> torch.Tensor:
    """Add `update` to `residual` in place; return the norm of the sum, or the sum itself."""
    if scale != 1:
        update = update * scale
    if norm is None:
        residual += update
        return residual
    normed: torch.Tensor = norm(update, residual)
    return normed


def _scaled(states: torch.Tensor, factor: float) -> torch.Tensor:
    return states if factor == 1 else states * factor


@lru_cache
def _rounded(number: float, dtype: torch.dtype) -> float:
    """Return `number` in `dtype`."""
    return torch.tensor(number, dtype=dtype).item()


class Body(nn.Module):
    """A decoder without its head."""

    def __init__(self, definition: Definition) -> None:
        super().__init__()
        self.definition = definition
        self.add_module(definition.embedding_name, nn.Embedding(definition.config.vocab_size, definition.width))
        if definition.positions_name:
            rows = definition.config.max_position_embeddings + definition.first_position
            self.add_module(definition.positions_name, nn.Embedding(rows, definition.width))
        make = definition.make_layer or DecoderLayer
        self.layers = nn.ModuleList(make(definition, index) for index in range(len(definition.windows)))
        self.add_module(definition.norm_name, definition.make_norm(definition.width))
        self.ropes: dict[str | None, Rope] = {}
        """By kind; None: of layers without positions, if their queries grow."""

    @property
    def embedding(self) -> nn.Module:
        return self.get_submodule(self.definition.embedding_name)

    @property
    def last_norm(self) -> nn.Module:
        return self.get_submodule(self.definition.norm_name)

    def attentions(self) -> Iterator[tuple[int, CausalAttention | LatentAttention]]:
        """Yield the number of the layer of each attention, and the attention."""
        for number, layer in enumerate(self.layers):
            for module in layer.modules():
                if isinstance(module, CausalAttention | LatentAttention):
                    yield number, module

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [T, width] of token ids and positions [T], as the first layer reads them."""
        definition, states = self.definition, self.embedding(tokens)
        if definition.positions_name:
            states = states + self._modules[definition.positions_name](positions + definition.first_position)  # type: ignore[misc]  # it is there
        if definition.norms_embedding:
            states = self.last_norm(states)
        scale = definition.embedding_scale
        return _scaled(states, _rounded(scale, states.dtype) if definition.rounds_embedding_scale else scale)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Return hidden states [T, width] after the final norm, of token ids and positions [T]."""
        residual = self.embed(tokens, positions)
        rotations = {kind: rope.at(positions) for kind, rope in self.ropes.items()}
        first, *following = [*(layer.norm_of(layer.definition.norms.before_attention) for layer in self.layers), self.last_norm]  # type: ignore[operator,union-attr]  # all are DecoderLayer
        states = residual if first is None else first(residual)
        if self.definition.wide_residual:
            residual = residual.float()
        for layer, norm in zip(self.layers, following, strict=True):
            states = layer(states, residual, rotations.get(layer.rope), context, norm)  # type: ignore[call-overload]
        return states


class Decoder(PreTrainedModel):  # type: ignore[misc]  # transformers is not typed
    """A whole model. `families.registry` makes a class of each family."""

    base_model_prefix = "model"
    _supports_sdpa = True
    define: Callable[[Any], Definition]
    """Returns the definition of a config."""
    model: Body

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: checkpoints of older names are converted as for transformers' own class."""
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return True: experts are transformers' own, which then run as grouped products."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.definition = type(self).define(config)
        self.add_module(self.base_model_prefix, (self.definition.make_body or Body)(self.definition))
        self._tied_weights_keys = {"lm_head.weight": f"{self.base_model_prefix}.{self.definition.embedding_name}.weight"}
        self.lm_head = nn.Linear(self.definition.width, config.vocab_size, bias=self.definition.head_bias)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise what a checkpoint lacks: routers without a correction of their scores (A.X K1) get zeros."""
        super()._init_weights(module)
        if (correction := module._buffers.get("e_score_correction_bias")) is not None:
            init.zeros_(correction)

    @property
    def layers(self) -> list[DecoderLayer]:
        """Return its layers, but for those of a family's own class."""
        return [layer for layer in self.model.layers if isinstance(layer, DecoderLayer)]

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Return what each layer with attention needs of it; of a sharded model, this rank's part."""
        return tuple(attention.spec for _, attention in self.model.attentions())

    @property
    def attending(self) -> list[int]:
        """Return the number of the layer of each attention."""
        return [number for number, _ in self.model.attentions()]

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return what recurrent layers keep of a request, in the order of their indices."""
        found: list[StateSpec] = []
        for layer in self.layers:
            if layer.recurs:
                found += getattr(layer.recurrent, "states", None) or (layer.recurrent.state,)
        return tuple(found)

    @torch.inference_mode()
    def prepare(self, limit: int) -> None:
        """Make the ropes for texts of up to `limit` tokens, and absorb projections. Called once the weights are on their device."""
        definition = self.definition
        for layer in self.modules():
            if isinstance(layer, LatentAttention):
                layer.absorb()
        for kind in dict.fromkeys(kind for kind in definition.ropes if kind is not None):
            frequencies, scale = find_frequencies(definition.config, kind, definition.head_dim, definition.partial_rope, limit)
            growth = definition.growth if definition.growth and definition.growth.length < limit else None
            frequencies = (-frequencies if definition.backward else frequencies).to(self.device)
            self.model.ropes[kind] = Rope(frequencies, scale, definition.interleaved, growth)
        if definition.plain_growth is not None:
            self.model.ropes[None] = Rope(torch.empty(0, device=self.device), growth=definition.plain_growth)

    def stack(self) -> int:
        """Stack projections of one input, in place; return the number of stacks."""
        return sum(module.stack() for module in self.modules() if isinstance(module, Projections))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] of hidden states [n, width]."""
        return self.finish(self.lm_head(states))

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits from those of its last matrix. It may change them in place."""
        scale, cap = self.definition.logits_scale, self.definition.logits_softcap
        if scale != 1:
            logits = logits * scale
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: StepContext,
        logits_to_keep: torch.Tensor | slice = slice(None),
        use_cache: bool = False,
    ) -> CausalLMOutput:
        """Run as transformers' models do, for code that runs either: [1, T] ids and positions -> logits [1, n, vocabulary]."""
        states = self.model(input_ids[0], position_ids[0], step)
        return CausalLMOutput(logits=self.logits(states[logits_to_keep])[None])
