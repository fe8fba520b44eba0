"""A text through the product's engine: the real loader, scheduler, cache and runner, with a view of the logits."""

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tests.worker.exactness.harness import Counted, Engine

from bench.quality.scores import BLOCK_LOGITS, Scores
from fairlead_worker.execution import forward as forwards
from fairlead_worker.execution.forward import Forward, HiddenStates
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.ipc.messages import Output, Sampling, Submit
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.model.loader import LoadedModel

See = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes the positions [k] and the logits [k, vocabulary] of some tokens of a step."""


@dataclass
class WatchedForward:
    """A forward pass that shows the logits of every computed position. Implements `execution.forward.Forward`."""

    inner: Forward
    see: See
    can_score: bool = True

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Score every token of the step, although no request asks for it: a cached prefix is used only by requests that do not ask."""
        logits, states = self.score(step, context, torch.arange(len(step.tokens)))
        block = max(1, BLOCK_LOGITS // logits.shape[1])
        for begin in range(0, len(step.tokens), block):
            states.logits(slice(begin, min(begin + block, len(step.tokens))))
        return logits

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        logits, states = self.inner.score(step, context, places)
        return logits, _WatchedStates(states, step.positions[places], self.see)


@dataclass(frozen=True)
class _WatchedStates:
    """Implements `execution.forward.HiddenStates`."""

    inner: HiddenStates
    positions: torch.Tensor
    see: See

    def logits(self, some: slice) -> torch.Tensor:
        logits = self.inner.logits(some)
        self.see(self.positions[some], logits)
        return logits

    def states(self, some: slice) -> torch.Tensor:
        return self.inner.states(some)


def score(engine: Engine, prompts: Sequence[list[int]], see: Callable[[torch.Tensor], None] = lambda _: None) -> Scores:
    """Return the prompt log-probabilities of `prompts`, one request after the other, as a client gets them.

    `see` gets the logits [k, vocabulary] of consecutive positions.
    """
    plain = engine.runner.forward
    engine.runner.forward = WatchedForward(plain, lambda _, logits: see(logits))
    scored = [each for prompt in prompts for output in serve(engine, prompt, prompt_logprobs=1) for each in output.prompt_logprobs]
    engine.runner.forward = plain
    return Scores(torch.tensor([each.chosen for each in scored]), torch.tensor([each.top_ids[0] for each in scored]))


def serve(engine: Engine, prompt: list[int], prompt_logprobs: int | None = None) -> list[Output]:
    """Run one request for one token to its end; return its results."""
    submit(engine, prompt, prompt_logprobs)
    outputs: list[Output] = []
    while not engine.scheduler.idle:
        outputs += step(engine)
    return outputs


def step(engine: Engine) -> list[Output]:
    """Run one step; return what it gave."""
    plan = engine.scheduler.plan()
    return list(engine.scheduler.advance(plan, engine.runner.execute(plan)))


def submit(engine: Engine, prompt: list[int], prompt_logprobs: int | None = None, priority: int = 0) -> None:
    """Add a request for one token to the engine's queue. Raises ValueError if the scheduler refuses it."""
    sampling = Sampling(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    engine.submitted += 1
    if refused := engine.scheduler.submit(Submit(str(engine.submitted), array("I", prompt).tobytes(), sampling, 0, priority)):
        raise ValueError(str(refused))


def make_engine(loaded: LoadedModel, tokens: int, chunk: int = 0, backend: str = "auto", host_tokens: int = 0) -> tuple[Engine, str]:
    """Return an engine with KV for `tokens`, and the path that its steps take: native, or layers with the reason."""
    reasons = _Messages()
    log = logging.getLogger(forwards.__name__)
    log.addHandler(reasons)
    try:
        engine = Engine(loaded, chunk, pages=-(-tokens // 16) + 1, backend=backend, host_slots=-(-host_tokens // 16))
    finally:
        log.removeHandler(reasons)
    chosen = engine.runner.forward
    assert isinstance(chosen, Counted)
    return engine, "native" if isinstance(chosen.inner, NativeForward) else f"layers{reasons.last}"


class _Messages(logging.Handler):
    """Remembers why a model runs layer by layer."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = f":{record.getMessage().partition(', not natively:')[2]}"
