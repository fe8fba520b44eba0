"""Trial of recorded CUDA graphs at the start: they are used if their logits are not farther from float32 than those of plain steps.

It runs before the first request, on the first pages of the KV, with rows of the model's trial text (`model.trial_text`). Rows are repeated
until a step fills a graph: repeated rows write the same numbers to the same pages. Overlap needs no trial: it runs the same kernels, and
`tests/worker/cuda` checks its order.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice, pairwise

import torch

from fairlead_worker.execution.cuda_graphs.decodes import describe_failure
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.kernels.base import KVSpec, PackedStep
from fairlead_worker.kernels.groups import spread
from fairlead_worker.model.acceptance import find_refusal
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.model.trial_text import LENGTHS, places, trial_pages
from fairlead_worker.weights.progress import Progress, no_progress

logger = logging.getLogger(__name__)

Rows = Sequence[tuple[int, int, int]]
"""As (text, start, count)."""
AT_ONCE = 64
"""Rows whose log-probabilities are computed together: those of a large graph need as much memory as its logits."""
TOKENS: Rows = [(text, at, 1) for text, length in enumerate(LENGTHS) for at in range(length)]
PROMPTS: Rows = [(text, 0, length) for text, length in enumerate(LENGTHS)]


@torch.inference_mode()
def try_graphs(runner: ModelRunner, adapter: int = 0, progress: Progress = no_progress) -> str:
    """Drop the CUDA graphs of `runner` that fail. Return why; empty: none does.

    `adapter`: number of a loaded LoRA adapter, 0: none. Any error of a replay is a reason to drop graphs, except on a sharded model, where
    other ranks may wait for this one, and if plain steps fail as well.
    """
    drafter, failures = runner.drafter, list[str]()
    recorded = [graphs.is_recorded for graphs in (runner.graphs, None if drafter is None else drafter.graphs) if graphs is not None]
    if not recorded and runner.pieces is None:
        return ""
    progress("trial", 0)
    if not all(recorded):
        drop_decodes(runner)
    elif recorded:
        failure = _guard(runner, lambda: _check_decodes(runner, adapter))
        if failure:
            failures.append(f"CUDA graphs failed the start-up trial and are off: {failure}")
            drop_decodes(runner)
    if runner.pieces is not None:
        failure = _guard(runner, lambda: _check_pieces(runner))
        if failure:
            failures.append(f"piecewise CUDA graphs failed the start-up trial and are off: {failure}")
            runner.pieces = None
    for failure in failures:
        logger.warning("%s", failure)
    return "; ".join(failures)


def drop_decodes(runner: ModelRunner) -> None:
    """Free the graphs for decodes, of the draft model and the other ranks too."""
    graphs, runner.graphs = runner.graphs, None
    if runner.drafter is not None:
        runner.drafter.graphs = None
    if graphs is not None and runner.followers is not None:
        runner.followers.drop_graphs()


def _guard(runner: ModelRunner, check: Callable[[], str]) -> str:
    """Return what `check` returns, or why it fails. Raises what a plain step raises after that."""
    device, spec = runner.loaded.device, runner.backend.spec
    if (needed := trial_pages(spec.page_size) * spec.num_groups) > runner.backend.pages:
        return f"the trial needs {needed} KV pages"
    try:
        return check()
    except Exception as error:
        if runner.loaded.ranks > 1:
            raise
        logger.warning("a step of the start-up trial failed", exc_info=error)
        failure = describe_failure(error)
    if device.type == "cuda":  # a plan that was cut short left copies that no event stands for
        torch.cuda.synchronize(device)
    model = _model_of(runner)
    model.run_plainly(model.pack(PROMPTS))
    return failure


def _check_decodes(runner: ModelRunner, adapter: int) -> str:
    """Return why the graphs for decodes may not replace plain steps; empty: they may."""
    graphs, drafter, reason = runner.graphs, runner.drafter, ""
    if graphs is not None:
        model = _model_of(runner)
        reason = model.compare(graphs.sizes)
        if adapter and not graphs.adapter_failure:
            reason = reason or model.compare(graphs.sizes, adapter)
    if not reason and drafter is not None and drafter.graphs is not None:
        draft = _Model(drafter.loaded, drafter.spec, drafter.run, lambda step: drafter.run(step, plainly=True))
        reason = draft.compare(drafter.graphs.sizes)
        return reason and f"of the draft model, {reason}"
    return reason


def _check_pieces(runner: ModelRunner) -> str:
    assert runner.pieces is not None, "they are recorded"
    return _model_of(runner).compare_prompts(runner.pieces.sizes)


def _model_of(runner: ModelRunner) -> "_Model":
    def run_plainly(step: PackedStep) -> torch.Tensor:
        with _plainly(runner):
            return runner.run(step)

    return _Model(runner.loaded, runner.backend.spec, runner.run, run_plainly)


@dataclass(frozen=True, slots=True)
class _Model:
    """One model, and two ways to run its steps."""

    loaded: LoadedModel
    spec: KVSpec
    run: Callable[[PackedStep], torch.Tensor]
    run_plainly: Callable[[PackedStep], torch.Tensor]

    def compare(self, sizes: Sequence[int], adapter: int = 0) -> str:
        """Compare steps of decodes that fill each size, joined and not, and one that is padded.

        The numbers of a model with an adapter in float32 are not known. So what a graph changes there is added to those without one.
        """
        for smaller, size in pairwise((0, *sizes)):
            for rows in (_repeat(TOKENS, size), _repeat(TOKENS[::-1], size), _repeat(TOKENS[::-1], smaller + 1)):
                self.run_plainly(self.pack(PROMPTS))  # the KV of all texts
                step, at = self.pack(rows), places(rows)
                replaced = self._logprobs(self.run_plainly(step), at)
                change: torch.Tensor | None = None
                if adapter:
                    step = replace(step, adapters=[adapter * (number % 3 == 1) for number in range(len(rows))])
                    change = self._logprobs(self.run_plainly(step), at)
                candidate = self._logprobs(self.run(step), at)
                if change is not None:
                    candidate = replaced + (candidate - change)
                if refusal := self._judge(candidate, replaced, at):
                    return f"{len(rows)} decodes{' with adapters' if adapter else ''}: {refusal}"
        return ""

    def compare_prompts(self, sizes: Sequence[int]) -> str:
        """Compare prompts that fill each size, and padded ones."""
        for smaller, size in pairwise((0, *sizes)):
            for tokens in (size, smaller + 2):
                rows = _cut(tokens)
                ends = list(accumulate(count for _, _, count in rows))
                step = self.pack(rows)
                step = replace(step, sampling=torch.tensor(ends, device=self.loaded.device) - 1)
                at = places([(text, count - 1, 1) for text, _, count in rows])
                replaced, candidate = (self._logprobs(run(step), at) for run in (self.run_plainly, self.run))
                if refusal := self._judge(candidate, replaced, at):
                    return f"prompts of {tokens} tokens: {refusal}"
        return ""

    def pack(self, rows: Rows) -> PackedStep:
        return spread(self.loaded.reference.text.step(rows, self.spec.page_size, self.loaded.device), self.spec)

    def _logprobs(self, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(logits, AT_ONCE), torch.split(at, AT_ONCE), strict=True)
        return torch.cat([self.loaded.reference.take(some, where) for some, where in parts])

    def _judge(self, candidate: torch.Tensor, replaced: torch.Tensor, at: torch.Tensor) -> str:
        exact = self.loaded.reference.logprobs
        return find_refusal(candidate, replaced, exact[at.to(exact.device)])


def _repeat(rows: Rows, count: int) -> Rows:
    return list(islice(cycle(rows), count))


def _cut(tokens: int) -> Rows:
    """Return prompts of `tokens` tokens together. The last one is cut."""
    rows = list[tuple[int, int, int]]()
    for text, start, count in cycle(PROMPTS):
        rows.append((text, start, min(count, tokens)))
        tokens -= count
        if tokens <= 0:
            break
    return rows


@contextmanager
def _plainly(runner: ModelRunner) -> Iterator[None]:
    """Have no graphs in this context."""
    graphs, pieces, runner.graphs, runner.pieces = runner.graphs, runner.pieces, None, None
    try:
        yield
    finally:
        runner.graphs, runner.pieces = graphs, pieces
