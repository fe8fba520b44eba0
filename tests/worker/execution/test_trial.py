"""The start-up trial of CUDA graphs and overlap: what passes it serves, and what differs or fails is off, with the reason."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.models.adapters import write_adapter
from tests.worker.execution.replayed import Replayed, filled_backend

from fairlead.random_model import make_model
from fairlead_worker.execution import overlap as overlap_module
from fairlead_worker.execution import trial
from fairlead_worker.execution.cuda_graphs import decodes as graphs_module
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, graphs_for
from fairlead_worker.execution.draft import Drafter
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.execution.trial import PLAIN, Modes, Outcome, try_modes
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.model.trial_text import Reference
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.decode_batch import PLACEHOLDER
from fairlead_worker.scheduler.plan import StepPlan

CONTEXT = 200
BOTH, GRAPHS, OVERLAP = Modes(graphs=True, overlap=True), Modes(graphs=True), Modes(overlap=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("trial") / "llama", arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=2, vocab=500
    )


@pytest.fixture(scope="module")
def half(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float16")


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial takes as long as it takes on this machine."""
    monkeypatch.setattr(trial, "MAX_SECONDS", float("inf"))


def graphed(loaded: LoadedModel, adapters: AdapterSet | None = None, verifies: bool = False) -> tuple[ModelRunner, Replayed]:
    """Return a runner on FlashInfer interpreted, with replayed graphs of up to 6 decodes."""
    runner, recorder = ModelRunner(loaded, filled_backend(loaded, 120), adapters=adapters), Replayed()
    slots = None if adapters is None else adapters.slots
    runner.graphs = graphs_for(runner.forward, runner.backend, 6, CONTEXT, recorder, slots, verifies)
    assert runner.graphs is not None
    runner.graphs.capture()
    return runner, recorder


def config(**settings: Any) -> SchedulerConfig:
    return SchedulerConfig(CONTEXT, **{"max_num_seqs": 16, "chunked_prefill_size": 16, **settings})


def run(runner: ModelRunner, overlap: bool = True, adapter: int = 0, **settings: Any) -> Outcome:
    return try_modes(runner, config(**settings), CONTEXT, overlap, adapter)


def plans_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Collect the plans that `runner` executes without overlap."""
    plans, execute = list[StepPlan](), runner.execute
    monkeypatch.setattr(runner, "execute", lambda plan: plans.append(plan) or execute(plan))
    return plans


def test_graphs_and_overlap_that_give_the_same_tokens_are_used(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, recorder = graphed(half)
    plans = plans_of(runner, monkeypatch)
    sizes: set[tuple[int, int]] = set()
    replay = graphs_module._Graph.run

    def replayed(self: Any, step: PackedStep, slots: Any = ()) -> torch.Tensor:
        sizes.add((self._size, len(step.starts)))
        return replay(self, step, slots)

    monkeypatch.setattr(graphs_module._Graph, "run", replayed)
    assert run(runner) == Outcome(BOTH)
    assert runner.graphs is not None and runner.graphs.is_recorded
    assert {size for size, _ in sizes} == {1, 2, 4, 6} and any(rows < size for size, rows in sizes), "also padded"
    assert set(recorder.replays) == set(range(4))
    chunks = {(row.request.id, row.start) for plan in plans for row in plan.rows if row.count > 1}
    assert len(chunks) > len({name for name, _ in chunks}), "prompts in several chunks"
    assert any(plan.decodes and plan.prefill_tokens for plan in plans), "a mixed step"
    samplings = [row.request.sampling for plan in plans for row in plan.rows]
    assert any(each.temperature for each in samplings) and any(not each.temperature for each in samplings)


def test_overlap_alone_is_tried_on_a_cpu_without_graphs(folder: Path) -> None:
    runner = make_runner(load_model(str(folder), dtype="float32"), page_size=16, kv_pages=40)
    assert run(runner) == Outcome(OVERLAP)
    assert run(runner, overlap=False) == Outcome(PLAIN)


def forget_placeholders(patch: pytest.MonkeyPatch) -> None:
    """A step computes with token 0 instead of the tokens of the step before it."""
    patch.setattr(overlap_module.OverlappedRunner, "_fill_placeholders", lambda self, plan, step: lambda: zero_placeholders(step))


def zero_placeholders(step: PackedStep) -> None:
    step.tokens.masked_fill_(step.tokens == PLACEHOLDER, 0)


def keep_positions(patch: pytest.MonkeyPatch) -> None:
    """A replay has the positions with which it was recorded."""
    pad = graphs_module._Graph._pad

    def stale(self: Any, step: PackedStep) -> PackedStep:
        whole = pad(self, step)
        whole.positions.zero_()
        return whole

    patch.setattr(graphs_module._Graph, "_pad", stale)


def replay_without_inputs(patch: pytest.MonkeyPatch) -> None:
    """A replay reads the tokens of the replay before it."""
    run = graphs_module._Graph.run

    def stale(self: Any, step: PackedStep, slots: Any = ()) -> torch.Tensor:
        before = self._inputs.tokens.clone()
        logits = run(self, step, slots)
        self._inputs.tokens.copy_(before)
        return self._replay() if not slots else logits

    patch.setattr(graphs_module._Graph, "run", stale)


def fail_replays(patch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, step: PackedStep, slots: Any = ()) -> torch.Tensor:
        raise RuntimeError("CUDA error: the replay failed\nCUDA kernel errors might be reported later")

    patch.setattr(graphs_module._Graph, "run", fail)


@pytest.mark.parametrize(
    ("plant", "modes", "reason"),
    [
        (forget_placeholders, GRAPHS, "these are off: overlap: "),
        (keep_positions, OVERLAP, "these are off: CUDA graphs: "),
        (replay_without_inputs, OVERLAP, "requests get other tokens than with plain steps; the first is 'trial, "),
        (fail_replays, OVERLAP, "CUDA graphs: RuntimeError: CUDA error: the replay failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_or_fails_is_off_with_the_reason(
    half: LoadedModel, plant: Callable[[pytest.MonkeyPatch], None], modes: Modes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = graphed(half)
    plant(monkeypatch)
    outcome = run(runner)
    assert outcome.modes == modes and reason in outcome.failure, outcome
    assert (runner.graphs is not None) == modes.graphs
    assert "\n" not in outcome.failure and "reported later" not in outcome.failure


def test_a_divergence_on_the_cpu_falls_back_to_the_plain_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_placeholders(monkeypatch)
    outcome = run(make_runner(load_model(str(folder), dtype="float32"), page_size=16, kv_pages=40))
    assert outcome.modes == PLAIN and outcome.failure.startswith("overlap failed the start-up trial and is off: ")


@contextmanager
def smaller_logits(runner: ModelRunner, factor: float) -> Iterator[None]:
    loaded = runner.loaded
    head = loaded.model.get_output_embeddings().weight
    weights = head.data.clone()
    head.data *= factor
    runner.loaded = replace(loaded, reference=Reference.compute(loaded.model, loaded.layers, loaded.reference.text))
    try:
        yield
    finally:
        head.data.copy_(weights)


@pytest.mark.parametrize(("alike", "modes"), [(True, BOTH), (False, OVERLAP)], ids=["plain steps too", "replays alone"])
def test_rounding_is_measured_on_the_model(half: LoadedModel, alike: bool, modes: Modes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays may choose other tokens as far as plain steps are from float32."""
    runner, _ = graphed(half)
    size, drawn, judged = 0.06, torch.Generator().manual_seed(1), list[str]()
    replay, forward, differing = GraphedDecodes.run, runner.forward, trial._Trial._differing

    def noisy(self: GraphedDecodes, step: PackedStep) -> torch.Tensor | None:
        logits = replay(self, step)
        return None if logits is None else logits + size * torch.randn(logits.shape, generator=drawn).to(logits.dtype)

    def by_size(step: PackedStep, context: Any) -> torch.Tensor:
        logits = forward(step, context)
        other = torch.Generator().manual_seed(len(step.counts))
        return logits + size * torch.randn(logits.shape, generator=other).to(logits.dtype)

    def counted(self: Any, wave: Any, got: dict[str, list[int]]) -> list[str]:
        judged.extend(request.id for request in wave.requests if got[request.id] != self._expected[request.id])
        return differing(self, wave, got)

    monkeypatch.setattr(GraphedDecodes, "run", noisy)
    monkeypatch.setattr(trial._Trial, "_differing", counted)
    if alike:
        monkeypatch.setattr(runner, "forward", by_size)
    with smaller_logits(runner, 0.1):  # they lie close together, so that the noise changes tokens
        assert run(runner).modes == modes
    assert judged, "no token was other"


def test_a_failing_device_ends_the_start(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error in a replay plain steps are checked again: a worker that cannot compute must not report that it is ready."""
    runner, _ = graphed(half)
    forward = runner.forward
    broken = False

    def fail(self: Any, step: PackedStep, slots: Any = ()) -> torch.Tensor:
        nonlocal broken
        broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def compute(step: PackedStep, context: Any) -> torch.Tensor:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return forward(step, context)

    monkeypatch.setattr(graphs_module._Graph, "run", fail)
    monkeypatch.setattr(runner, "forward", compute)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(runner)


def test_an_error_on_a_sharded_model_ends_the_start(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may wait in a collective for this one, so it must not go on with other steps."""
    runner, _ = graphed(half)
    runner.loaded = replace(half, ranks=2)
    fail_replays(monkeypatch)
    with pytest.raises(RuntimeError, match="the replay failed"):
        run(runner)


def test_a_trial_that_takes_long_falls_back(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_SECONDS", 20.0)
    runner, _ = graphed(half)
    times: Iterator[float] = iter(range(1000))
    outcome = try_modes(runner, config(), CONTEXT, True, clock=lambda: float(next(times)))
    assert outcome.modes == PLAIN and runner.graphs is None
    assert outcome.failure == "CUDA graphs and overlap could not be tried and are off: the trial takes longer than 20 s"


@pytest.mark.parametrize(("pages", "context"), [(3, 200), (120, 12), (5, 9)], ids=["few pages", "short context", "both"])
def test_the_trial_fits_small_caches_and_short_contexts(folder: Path, pages: int, context: int) -> None:
    runner = make_runner(load_model(str(folder), dtype="float32"), page_size=16, kv_pages=pages)
    assert try_modes(runner, SchedulerConfig(context), min(context, pages * 16), True) == Outcome(OVERLAP)


def test_a_request_exceeds_the_sliding_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_model(tmp_path / "mistral", arch="mistral", sliding_window=100)
    runner = make_runner(load_model(str(made), dtype="float32"), page_size=16, kv_pages=60)
    plans = plans_of(runner, monkeypatch)
    assert run(runner) == Outcome(OVERLAP)
    assert max(row.end for plan in plans for row in plan.rows) > 100


def test_a_draft_models_graphs_are_tried_too(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference turns off the graphs of both models."""
    settings: dict[str, Any] = {"speculative_method": "draft", "speculative_num_tokens": 3}

    def make() -> tuple[ModelRunner, Replayed]:
        runner, _ = graphed(half)
        drafts, recorder = ModelRunner(half, filled_backend(half, 120)), Replayed()
        runner.drafter = Drafter(drafts.forward, half, drafts.backend, 500)
        runner.drafter.graphs = graphs_for(drafts.forward, drafts.backend, 4, CONTEXT, recorder)
        assert runner.drafter.graphs is not None
        runner.drafter.graphs.capture()
        return runner, recorder

    runner, recorder = make()
    assert run(runner, overlap=False, **settings) == Outcome(GRAPHS)
    assert recorder.replays and runner.drafter is not None and runner.drafter.graphs is not None
    assert all(seen.request.finish for seen in runner.drafter._seen.values()), "it forgets them at its next step"
    keep_positions(monkeypatch)
    runner, _ = make()
    outcome = run(runner, overlap=False, **settings)
    assert outcome.modes == PLAIN and outcome.failure.startswith("CUDA graphs failed the start-up trial")
    assert runner.graphs is None and runner.drafter is not None and runner.drafter.graphs is None


def test_graphs_of_joined_rows_are_tried_with_ngrams(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first request that repeats itself would be the trial."""
    settings: dict[str, Any] = {"speculative_method": "ngram", "speculative_num_tokens": 3}
    joined, plan = list[int](), graphs_module._Graph._plan

    def counted(self: Any, step: PackedStep) -> None:
        if not self._paging.single:
            joined.append(self._size)
        plan(self, step)

    monkeypatch.setattr(graphs_module._Graph, "_plan", counted)
    runner, _ = graphed(half, verifies=True)
    joined.clear()
    assert run(runner, overlap=False, **settings) == Outcome(GRAPHS)
    assert joined
    monkeypatch.setattr(graphs_module, "join_rows", lambda step: replace(step, starts=[0] * len(step.starts)))
    runner, _ = graphed(half, verifies=True)
    outcome = run(runner, overlap=False, **settings)
    assert outcome.modes == PLAIN and "CUDA graphs failed the start-up trial" in outcome.failure


def test_a_loaded_adapter_is_tried_beside_rows_without_one(half: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterSet(half, 2, 8)
    adapters.allocate_slots()
    adapters.load(1, "a", "file:///a", write_adapter(half, tmp_path / "a", 1, 4, scale=0.2))
    try:
        runner, _ = graphed(half, adapters)
        plans = plans_of(runner, monkeypatch)
        assert run(runner, adapter=1) == Outcome(BOTH)
        kinds = {frozenset(row.request.adapter for row in plan.rows) for plan in plans}
        assert {frozenset({0, 1}), frozenset({0})} <= kinds
        monkeypatch.setattr(graphs_module.GraphedDecodes, "_slots_of", lambda self, step: [2] * len(step.adapters) if step.adapters else ())
        outcome = run(runner, adapter=1)
        assert outcome.modes == OVERLAP and "get other tokens" in outcome.failure
    finally:
        adapters.unload(1)
