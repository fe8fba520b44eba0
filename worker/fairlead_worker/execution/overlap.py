"""Overlapped steps: a step is launched before the previous step's tokens reach the host. Implements `engine.overlap.AheadRunner`.

The forward pass reads those tokens on the device: an unread token of a request is an index into the tensor of the last sampled
tokens. Sampling is launched later, once the host knows the previous tokens, so penalties, bans, grammars and noise equal those of the
plain loop. The forward pass already runs by then, so on a GPU neither side waits for the other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.stream import DeviceStream, Stream
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.kernels.transfer import to_device, watch
from fairlead_worker.sampling.grammars import Grammars
from fairlead_worker.sampling.masks import Masks
from fairlead_worker.sampling.sampler import choose, gather_logprobs
from fairlead_worker.scheduler.plan import Row, StepPlan, StepResult
from fairlead_worker.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens on the device, and the index of each request among them."""

    tokens: torch.Tensor
    """[n] int64"""
    rows: dict[Request, int]


class OverlappedRunner:
    """Steps of a model runner, queued one behind the other on one stream."""

    def __init__(self, runner: ModelRunner, stream: Stream | None = None) -> None:
        """`stream`: None means the device's current stream."""
        self.runner = runner
        self.stream = stream or DeviceStream()
        self.unread: SampledTokens | None = None
        """Tokens of the last launched step, until they are read."""
        self.read_at = 0.0
        """When a step was last read; `perf_counter` seconds."""

    def can_launch(self, plan: StepPlan) -> bool:
        """Return whether `plan` needs no host work inside the step: no prompt scores, no pooling, no drafts."""
        return not (plan.scores or plan.pools or plan.drafted)

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute a step while no other step is in flight."""
        result = self.stream.run(lambda: self.runner.execute(plan))()
        self.read_at = time.perf_counter()
        return result

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        began, runner = time.perf_counter(), self.runner
        step = runner.pack(plan, runner.backend.spec.page_size, runner.loaded.device)
        fill = self._fill_unread(plan, step)

        @torch.inference_mode()
        def forward() -> torch.Tensor:
            if runner.host is not None:
                runner.host.copy(plan.saves, plan.loads)
            return runner.run(step, fill)

        return LaunchedStep(self, plan, self.stream.run(forward), began)

    def _fill_unread(self, plan: StepPlan, step: PackedStep) -> Callable[[], object] | None:
        """Return a function that puts the tokens of the previous step where the plan's are unread; None: there are none."""
        choice, at, chosen, end = self.unread, list[int](), list[int](), 0
        if choice is None:
            return None
        for row in plan.rows:
            end += row.count
            place = choice.rows.get(row.request)
            if place is not None and row.end > len(row.request.tokens):
                at.append(end - 1)
                chosen.append(place)
        if not at:
            return None
        device, tokens = step.tokens.device, choice.tokens
        to, source = to_device(at, device), to_device(chosen, device)
        return lambda: step.tokens.index_copy_(0, to, tokens.index_select(0, source))


class LaunchedStep:
    """Step in flight. Implements `engine.overlap.Launched`."""

    def __init__(self, owner: OverlappedRunner, plan: StepPlan, logits: Callable[[], torch.Tensor], began: float) -> None:
        self._owner, self._plan, self._began = owner, plan, began
        self._logits: Callable[[], torch.Tensor] | None = logits
        """None once tokens are sampled: the next step reuses the memory of the logits."""
        self._rows: list[Row] = []
        self._grammars: Grammars | None = None
        self._masks: Masks | None = None
        self._tokens: Callable[[], torch.Tensor] | None = None
        self._logprobs: Callable[[], list[tuple[TokenLogprobs, ...]]] | None = None

    def choose(self, rows: list[Row]) -> None:
        owner, plan, self._rows = self._owner, self._plan, rows
        awaited, self._logits = self._logits, None
        assert awaited is not None, "tokens are chosen once"
        if not rows:
            owner.unread = None
            return
        grammars = self._grammars = owner.runner.begin_masks(rows)
        logits = awaited()
        if len(rows) < plan.samples:
            wanted = set(rows)
            kept = [place for place, row in enumerate(row for row in plan.rows if row.samples) if row in wanted]
            logits = logits[to_device(kept, logits.device)]
        self._masks = None if grammars is None else grammars.masks(rows, plan.samples < len(plan.rows), watch(logits.device))
        requests = [row.request for row in rows]
        with torch.inference_mode():
            tokens = choose(logits, requests, masks=self._masks, fused=owner.runner.fused_sampler)
            asked = gather_logprobs(logits, tokens, requests)
            # Copy with the tokens: a copy started at `read` would queue behind the next forward pass.
            self._logprobs = None if asked is None else asked.fetch(owner.stream.fetch)
            self._tokens = owner.stream.fetch(tokens)
        owner.unread = SampledTokens(tokens, {request: place for place, request in enumerate(requests)})

    def read(self) -> StepResult:
        owner, rows = self._owner, self._rows
        tokens: list[list[int]] = [] if self._tokens is None else [[token] for token in self._tokens().tolist()]
        owner.unread = None
        endings = {} if self._grammars is None or self._masks is None else self._grammars.accept(rows, tokens, self._masks)
        logprobs = [] if self._logprobs is None else self._logprobs()
        now = time.perf_counter()
        seconds, owner.read_at = now - max(self._began, owner.read_at), now
        return StepResult(tokens, logprobs, seconds, endings=endings)
