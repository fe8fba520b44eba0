"""Forward passes: turn a packed step into logits, module by module or in one native call."""

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.kernels.base import Backend, KVSpec, PackedStep, StepContext
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.head import Head, find_head
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.structure import Decoder, UnknownStructure, recognise
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


class ModuleForward:
    """The model's own modules, on any backend."""

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


def choose_forward(loaded: LoadedModel, backend: Backend, native: bool = True) -> Forward:
    """Return the native decoder if it supports the model and is not farther from float32 than the modules; else the modules, with the
    reason logged.
    """
    modules = ModuleForward(loaded.model)
    if not native or not isinstance(backend, NativeBackend) or loaded.ranks > 1:  # one native call cannot pause for the sums over ranks
        return modules
    name = type(loaded.model).__name__
    try:
        decoder = recognise(loaded.model, loaded.layers)
        forward = NativeForward(decoder, backend, loaded.max_model_len)
        refusal = _try_native(modules, decoder, loaded, replace(backend.spec, groups=()))
    except UnknownStructure as reason:
        logger.warning("%s runs module by module, not natively: %s", name, reason)
        return modules
    if refusal:
        logger.warning("%s runs module by module, not natively: %s", name, refusal)
        return modules
    logger.info("%s runs natively: %d layers in one call, as near to float32 as its modules", name, len(decoder.layers))
    return forward


@torch.inference_mode()
def _try_native(modules: Forward, decoder: Decoder, loaded: LoadedModel, spec: KVSpec) -> str:
    """Return why the native decoder may not replace the modules; empty: it may. Each runs on its own KV."""
    plain, native = (NativeBackend(spec, trial_pages(spec.page_size)) for _ in range(2))
    forward, reference = NativeForward(decoder, native, loaded.max_model_len), loaded.reference
    whole = reference.text.whole(spec.page_size, spec.device)
    replaced, candidate = reference.take(modules(whole, plain.plan(whole))), torch.empty_like(reference.logprobs)
    for rows in STEPS:
        step, at = reference.text.step(rows, spec.page_size, spec.device), places(rows)
        candidate[at] = reference.take(forward(step, native.plan(step)), at)
    return find_refusal(candidate, replaced, reference.logprobs)
