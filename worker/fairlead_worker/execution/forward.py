"""Forward passes: turn a packed step into logits, in one native call, by the layers of our own decoders, or by transformers' modules."""

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from fairlead_worker.execution.native_forward import NativeForward, NotNative
from fairlead_worker.ipc.messages import DecoderPath
from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep, StepContext
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.head import Head, find_head
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.trial_text import STEPS, places, trial_pages

logger = logging.getLogger(__name__)


class HiddenStates(Protocol):
    """The model's results at requested token positions."""

    def logits(self, some: slice) -> torch.Tensor:
        """Return logits [n, vocabulary] of some positions. Call it for a few at a time: [tokens, vocabulary] may not fit."""
        ...

    def states(self, some: slice) -> torch.Tensor:
        """Return hidden states [n, hidden] of some positions, after the final norm."""
        ...


class Forward(Protocol):
    """A pass over a packed step that also writes its KV."""

    can_score: bool
    """Whether `score` works."""

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return logits [S, vocabulary] of `step.sampling`."""
        ...

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        """Return the same logits, and the model's results at `places` ([n] int64: token indices of the step)."""
        ...


@runtime_checkable
class SplitForward(Forward, Protocol):
    """A forward pass whose body and head can run apart, if `can_score`."""

    def run_body(self, step: PackedStep, context: StepContext) -> Any:
        """Return what `run_head` turns into logits. `step` samples nothing."""
        ...

    def run_head(self, answer: Any, places: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocabulary] of token indices `places` [n]."""
        ...


class LayerForward:
    """The layers of one of our own decoders, on any backend."""

    can_score = True
    path: DecoderPath = "layers"

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        return self.run_head(self.run_body(step, context), step.sampling)

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        states = self.run_body(step, context)
        return self.run_head(states, step.sampling), _LayerStates(self._model, states, places)

    def run_body(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return hidden states [T, width]."""
        states: torch.Tensor = self._model.model(step.tokens, step.positions, context)
        return states

    def run_head(self, answer: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self._model.logits(answer[places])


@dataclass(frozen=True, slots=True)
class _LayerStates:
    """Implements `HiddenStates`."""

    model: Decoder
    answer: torch.Tensor
    """[T, width]"""
    places: torch.Tensor

    def logits(self, some: slice) -> torch.Tensor:
        return self.model.logits(self.states(some))

    def states(self, some: slice) -> torch.Tensor:
        return self.answer[self.places[some]]


class ModuleForward:
    """The generic path: transformers' modules, on any backend."""

    path: DecoderPath = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head = find_head(model)
        self.can_score = self._head is not None

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        output = self._model(
            input_ids=step.tokens[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=step.sampling, step=context
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        head = self._head
        assert head is not None, "can_score says so"
        with head.record() as answers:
            logits = self(step, context)
        return logits, _ModuleStates(head, answers[0], places)

    def run_body(self, step: PackedStep, context: StepContext) -> Any:
        assert self._head is not None, "can_score says so"
        with self._head.record() as answers:
            self(step, context)
        return answers[0]

    def run_head(self, answer: Any, places: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "can_score says so"
        return self._head.logits(answer, places)


@dataclass(frozen=True, slots=True)
class _ModuleStates:
    """Implements `HiddenStates` on a recorded body output."""

    head: Head
    answer: Any
    places: torch.Tensor

    def logits(self, some: slice) -> torch.Tensor:
        return self.head.logits(self.answer, self.places[some])

    def states(self, some: slice) -> torch.Tensor:
        states: torch.Tensor = self.answer[0][0, self.places[some]]
        return states


def plain_forward(model: PreTrainedModel) -> LayerForward | ModuleForward:
    """Return the forward pass that runs on any backend and for adapters."""
    return LayerForward(model) if isinstance(model, Decoder) else ModuleForward(model)


def choose_forward(loaded: LoadedModel, backend: Backend, native: bool = True) -> NativeForward | LayerForward | ModuleForward:
    """Return the native decoder if it computes what the model is defined to compute, and is not farther from float32 than its layers; else
    the layers, with the reason logged.
    """
    layers = plain_forward(loaded.model)
    if not native or not isinstance(backend, NativeBackend) or loaded.ranks > 1:  # one native call cannot pause for the sums over ranks
        return layers
    name = type(loaded.model).__name__
    try:
        forward = NativeForward(loaded.model, backend, loaded.max_model_len)
        refusal = _try_native(layers, loaded, replace(backend.spec, groups=()))
    except NotNative as reason:
        logger.warning("%s runs layer by layer, not natively: %s", name, reason)
        return layers
    if refusal:
        logger.warning("%s runs layer by layer, not natively: %s", name, refusal)
        return layers
    logger.info("%s runs natively: %d layers in one call, as near to float32 as one by one", name, len(loaded.layers))
    return forward


@torch.inference_mode()
def _try_native(layers: Forward, loaded: LoadedModel, spec: KVSpec) -> str:
    """Return why the native decoder may not replace the layers; empty: it may. Each runs on its own KV."""
    plain, native = (NativeBackend(spec, trial_pages(spec.page_size)) for _ in range(2))
    forward, reference = NativeForward(loaded.model, native, loaded.max_model_len), loaded.reference
    whole = reference.text.whole(spec.page_size, spec.device)
    replaced, candidate = reference.take(layers(whole, plain.plan(whole))), torch.empty_like(reference.logprobs)
    for rows in STEPS:
        step, at = reference.text.step(rows, spec.page_size, spec.device), places(rows)
        candidate[at] = reference.take(forward(step, native.plan(step)), at)
    return find_refusal(candidate, replaced, reference.logprobs)
