"""Trial of CUDA graphs and overlap at the start: the same requests run with plain steps and with these, and their tokens are compared.

It runs before the first request, on the runner's pages, with a scheduler and a prefix cache of its own. So it leaves no entry in the
engine's cache and no count in its statistics. Only rank 0 plans and samples, so its outcome is that of all ranks.

A padded batch and a graph's plan may sum in another order, which turns the last bits of a logit. So another token counts as equal if plain
steps choose it too once its logit is larger, and that of the first token smaller, by what rounding explains. That depends on the model and
the device, so it is measured: how far plain steps are from float32 on a text (`model.trial_text`).
"""

import logging
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import structs

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.overlap import Overlap
from fairlead_worker.engine.request_timer import RequestTimer
from fairlead_worker.execution.cuda_graphs.decodes import describe_failure
from fairlead_worker.execution.overlap import OverlappedRunner
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.trial_requests import TrialRequests, Wave
from fairlead_worker.ipc.messages import TokenLogprobs
from fairlead_worker.model.acceptance import FLOOR
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.overlap_scheduler import OverlapScheduler
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler
from fairlead_worker.scheduler.step_outputs import StepOutputs
from fairlead_worker.weights.progress import Progress, no_progress

MAX_SECONDS = 20.0
"""Limit of the whole trial; a trial that is not over by then counts as failed."""
MARGIN = 2.0
"""How much farther than measured other steps may be: a trial chooses from many more logits than are measured."""

logger = logging.getLogger(__name__)


class Modes(NamedTuple):
    """How steps run."""

    graphs: bool = False
    overlap: bool = False
    pieces: bool = False


NAMES = ("CUDA graphs", "overlap", "piecewise CUDA graphs")
"""Of the fields of `Modes`."""
PLAIN = Modes()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine uses."""

    modes: Modes
    failure: str = ""
    """Why some modes are off although they were wanted; empty: they are not."""


def try_modes(
    runner: ModelRunner,
    config: SchedulerConfig,
    context: int,
    overlap: bool,
    adapter: int = 0,
    progress: Progress = no_progress,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Try the recorded CUDA graphs of `runner`, and overlap if it is wanted, and turn those graphs off in `runner` that fail.

    `context`: tokens of the longest sequence. `adapter`: number of a loaded LoRA adapter, 0: none. Any error of the trial is a reason to
    fall back, except on a sharded model, where other ranks may wait for this one, and if plain steps fail as well.
    """
    drafter = runner.drafter
    recorded = [each.is_recorded for each in (runner.graphs, None if drafter is None else drafter.graphs) if each is not None]
    wanted = Modes(bool(recorded) and all(recorded), overlap, runner.pieces is not None)
    if wanted == PLAIN or not config.generates:
        _drop_graphs(runner)  # nothing runs untried
        return Outcome(PLAIN)
    began = clock()
    trial = _Trial(runner, config, context, adapter, progress, lambda: clock() - began > MAX_SECONDS)
    modes, failure = _choose(trial, wanted)
    if not modes.graphs:
        pieces = runner.pieces
        _drop_graphs(runner)
        runner.pieces = pieces
    if not modes.pieces:
        runner.pieces = None
    if trial.has_raised:
        trial.serve_plainly()
    if failure:
        logger.warning("%s", failure)
    else:
        logger.info("%s give the tokens of plain steps for %d requests (%.1f s)", _name(modes), trial.count, clock() - began)
    return Outcome(modes, failure)


def _drop_graphs(runner: ModelRunner) -> None:
    recorded, runner.graphs, runner.pieces = runner.graphs, None, None
    if runner.drafter is not None:
        runner.drafter.graphs = None
    if recorded is not None and runner.followers is not None:
        runner.followers.drop_graphs()


def _choose(trial: "_Trial", wanted: Modes) -> tuple[Modes, str]:
    """Return the modes that passed, and why the others are off."""
    failure = trial.prepare() or trial.compare(wanted)
    if not failure:
        return wanted, ""
    if not trial.can_continue:
        return PLAIN, f"{_name(wanted)} could not be tried and are off: {failure}"
    single = [Modes(**{name: True}) for name in Modes._fields if getattr(wanted, name)]
    if len(single) == 1:
        return PLAIN, f"{_name(wanted)} failed the start-up trial and is off: {failure}"
    failures = {modes: trial.compare(modes) for modes in single}
    alone = [modes for modes, found in failures.items() if not found]
    passed = Modes(*map(any, zip(*alone, strict=True))) if alone else PLAIN
    if len(alone) > 1 and (passed == wanted or trial.compare(passed)):
        passed = alone[0]
    off = [modes for modes in single if not any(map(all, zip(modes, passed, strict=True)))]
    others = [f"{_name(modes)}: {failures[modes] or f'beside {_name(passed)}, {failure}'}" for modes in off]
    return passed, f"the start-up trial failed, and these are off: {'; '.join(others)}"


def _name(modes: Modes) -> str:
    return " and ".join(name for name, is_on in zip(NAMES, modes, strict=True) if is_on)


class _TookTooLong(Exception):
    """The trial is over its time."""


class _Trial:
    """The requests of a trial, and their tokens with plain steps."""

    def __init__(
        self, runner: ModelRunner, config: SchedulerConfig, context: int, adapter: int, progress: Progress, is_over: Callable[[], bool]
    ) -> None:
        self.has_raised = False
        """Whether a step has failed, so that the device may be unusable."""
        self.can_continue = True
        """Whether plain steps have shown what to expect, and there is time left."""
        self._runner, self._progress, self._is_over = runner, progress, is_over
        self._page_size, self._pages = runner.backend.spec.page_size, runner.backend.pages
        self._runs = 0
        self._expected: dict[str, list[int]] = {}
        self._measured: float | None = None
        """The largest change of a logit that rounding explains; None: not measured, as no token differed."""
        requests = TrialRequests(runner, config, context, adapter)
        self._waves, self._measured_prompts = requests.waves, requests.measured
        self.count = sum(len(wave.requests) for wave in self._waves)

    def prepare(self) -> str:
        """Run the requests with plain steps. Return why that failed; empty: it did not."""
        self.can_continue = not (failure := self._guard(self._expect))
        return failure

    def compare(self, modes: Modes) -> str:
        """Run the requests in `modes`. Return what differs, or why a step failed; empty: all tokens are equal."""
        return self._guard(lambda: self._find_difference(self._run(modes)))

    def serve_plainly(self) -> None:
        """Run some requests with plain steps. Raises what a step raises."""
        self._is_over = lambda: False
        with self._graphs(PLAIN):
            self._serve(self._waves[-1], overlapped=False)

    def _guard(self, run: Callable[[], str]) -> str:
        self._progress("trial", min(99, 20 * self._runs))
        self._runs += 1
        try:
            return run()
        except _TookTooLong:
            self.can_continue = False
            return f"the trial takes longer than {MAX_SECONDS:g} s"
        except Exception as error:
            if self._runner.loaded.ranks > 1:
                raise
            logger.warning("a step of the start-up trial failed", exc_info=error)
            self.has_raised = True
            device = self._runner.loaded.device
            if device.type == "cuda":  # a plan that was cut short left copies that no event stands for
                torch.cuda.synchronize(device)
            return describe_failure(error)

    def _expect(self) -> str:
        self._expected = self._run(PLAIN)
        return ""

    def _run(self, modes: Modes) -> dict[str, list[int]]:
        """Return the tokens of each request."""
        with self._graphs(modes):
            return {name: tokens for wave in self._waves for name, tokens in self._serve(wave, modes.overlap).items()}

    @contextmanager
    def _graphs(self, modes: Modes) -> Iterator[None]:
        """Have no graphs besides those of `modes` in this context."""
        runner, drafter = self._runner, self._runner.drafter
        graphs, pieces, drafted = runner.graphs, runner.pieces, None if drafter is None else drafter.graphs
        if not modes.graphs:
            runner.graphs = None
            if drafter is not None:
                drafter.graphs = None
        if not modes.pieces:
            runner.pieces = None
        try:
            yield
        finally:
            runner.graphs, runner.pieces = graphs, pieces
            if drafter is not None:
                drafter.graphs = drafted

    def _serve(self, wave: Wave, overlapped: bool, logprobs: dict[str, list[TokenLogprobs]] | None = None) -> dict[str, list[int]]:
        """Run the requests of `wave` to their end with an empty cache. Return the tokens of each. `logprobs`: gets those of each."""
        scheduler = Scheduler(wave.config, PrefixCache(PagePool(self._pages, self._page_size), self._page_size, extend))
        tokens = {request.id: array("I") for request in wave.requests}

        def report(plan: StepPlan, result: StepResult, outputs: StepOutputs) -> None:
            for output in outputs:
                tokens[output.id].frombytes(output.tokens)
                if logprobs is not None:
                    logprobs.setdefault(output.id, []).extend(output.logprobs)

        for request in wave.requests:
            if (refused := scheduler.submit(request)) is not None:
                raise ValueError(refused.error)
        loop = Overlap(OverlapScheduler(scheduler), OverlappedRunner(self._runner), RequestTimer(), report) if overlapped else None
        try:
            while not scheduler.idle:
                if self._is_over():
                    raise _TookTooLong
                if loop is not None:
                    loop.step()
                else:
                    plan = scheduler.plan()
                    result = self._runner.execute(plan)
                    report(plan, result, scheduler.advance(plan, result))
            if loop is not None:
                loop.reconcile()
        finally:
            for request in wave.requests:  # so that the runner forgets those that an error left behind
                scheduler.abort(request.id)
        return {name: found.tolist() for name, found in tokens.items()}

    def _find_difference(self, got: dict[str, list[int]]) -> str:
        """Return how many requests have other tokens, and the first of them; empty if rounding explains all differences."""
        wrong = [name for wave in self._waves for name in self._differing(wave, got)]
        if not wrong:
            return ""
        at = _first_difference(self._expected[wrong[0]], got[wrong[0]])
        first = f"the first is {wrong[0]!r}, from token {at + 1} on"
        return f"{len(wrong)} of {self.count} requests get other tokens than with plain steps; {first}"

    def _differing(self, wave: Wave, got: dict[str, list[int]]) -> list[str]:
        """Return the requests of `wave` whose first other token plain steps would not choose, whatever is rounded."""
        other: dict[str, int] = {}
        judged = []
        for request in wave.requests:
            want, have = self._expected[request.id], got[request.id]
            if want == have:
                continue
            at = _first_difference(want, have)
            if at == min(len(want), len(have)):
                return [request.id]
            other[request.id] = have[at]
            rounding = self._rounding()
            bias = ((have[at], rounding), (want[at], -rounding))
            text = request.tokens + array("I", want[:at]).tobytes()
            judged.append(structs.replace(request, tokens=text, sampling=structs.replace(request.sampling, max_tokens=1, logit_bias=bias)))
        if not judged:
            return []
        with self._graphs(PLAIN):
            chosen = self._serve(Wave(wave.config, judged), overlapped=False)
        return [name for name, token in other.items() if chosen[name] != [token]]

    def _rounding(self) -> float:
        """Return the largest change of a logit that rounding explains."""
        if self._measured is None:
            self._measured = MARGIN * self._measure()
            logger.info(
                "plain steps are up to %.3f nats from float32; changes up to %.3f are taken for rounding",
                self._measured / MARGIN,
                self._measured,
            )
        return self._measured

    def _measure(self) -> float:
        """Return the largest distance of a likely token's log-probability to float32, and at least what float32 itself has."""
        reference, found = self._runner.loaded.reference, dict[str, list[TokenLogprobs]]()
        with self._graphs(PLAIN):
            self._serve(self._measured_prompts, False, found)
        changes = [FLOOR * reference.logprobs.abs().max().item()]
        for name, (first, *_) in found.items():
            place = int(name.rpartition(" ")[2])
            exact = dict(zip(reference.likely[place].tolist(), reference.logprobs[place].tolist(), strict=True))
            changes += [abs(value - exact[token]) for token, value in zip(first.top_ids, first.top_logprobs, strict=True) if token in exact]
        return max(changes)


def _first_difference(want: Sequence[int], have: Sequence[int]) -> int:
    """Return the index of the first token that differs, or the shorter length."""
    return next((at for at, (one, two) in enumerate(zip(want, have, strict=False)) if one != two), min(len(want), len(have)))
