"""The start-up trial of CUDA graphs: they are used if they are as near to float32 as plain steps, else off with the reason."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.models.adapters import write_adapter
from tests.worker.execution.replayed import Replayed, filled_backend

from fairlead.random_model import make_model
from fairlead_worker.execution.cuda_graphs import decodes as graphs_module
from fairlead_worker.execution.cuda_graphs.decodes import GraphedDecodes, graphs_for
from fairlead_worker.execution.draft import Drafter
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model

CONTEXT = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("trial") / "llama", arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=2, vocab=500
    )


@pytest.fixture(scope="module")
def half(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float16")


def graphed(
    loaded: LoadedModel, adapters: AdapterSet | None = None, verifies: bool = False, pages: int = 120
) -> tuple[ModelRunner, Replayed]:
    """Return a runner on FlashInfer interpreted, with replayed graphs of up to 6 decodes."""
    runner, recorder = ModelRunner(loaded, filled_backend(loaded, pages), adapters=adapters), Replayed()
    slots = None if adapters is None else adapters.slots
    runner.graphs = graphs_for(runner.forward, runner.backend, 6, CONTEXT, recorder, slots, verifies)
    assert runner.graphs is not None
    runner.graphs.capture()
    return runner, recorder


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


def replayed_sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Collect the size, the rows, and whether rows are joined, of each replay."""
    sizes, replay = list[tuple[int, int, bool]](), graphs_module._Graph.run

    def run(self: Any, step: PackedStep, slots: Any = ()) -> torch.Tensor:
        sizes.append((self._size, len(step.starts), not self._paging.single))
        return replay(self, step, slots)

    monkeypatch.setattr(graphs_module._Graph, "run", run)
    return sizes


def test_every_graph_is_tried_full_and_padded(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, recorder = graphed(half)
    sizes = replayed_sizes(monkeypatch)
    assert try_graphs(runner) == ""
    assert runner.graphs is not None and runner.graphs.is_recorded
    assert {(size, rows) for size, rows, _ in sizes} == {(1, 1), (2, 2), (4, 4), (4, 3), (6, 6), (6, 5)}
    assert set(recorder.replays) == set(range(4))


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (keep_positions, "from float32"),
        (replay_without_inputs, "from float32"),
        (fail_replays, "RuntimeError: CUDA error: the replay failed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_differs_or_fails_is_off_with_the_reason(
    half: LoadedModel, plant: Callable[[pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = graphed(half)
    plant(monkeypatch)
    failure = try_graphs(runner)
    assert failure.startswith("CUDA graphs failed the start-up trial and are off: ") and reason in failure
    assert runner.graphs is None and "\n" not in failure and "reported later" not in failure


@pytest.mark.parametrize(("alike", "passes"), [(True, True), (False, False)], ids=["plain steps too", "replays alone"])
def test_graphs_may_be_as_far_from_float32_as_plain_steps(
    half: LoadedModel, alike: bool, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = graphed(half)
    drawn, replay, forward = torch.Generator().manual_seed(1), GraphedDecodes.run, runner.forward

    def blur(logits: torch.Tensor) -> torch.Tensor:
        return logits + 0.06 * torch.randn(logits.shape, generator=drawn).to(logits.dtype)

    def noisy(self: GraphedDecodes, step: PackedStep) -> torch.Tensor | None:
        logits = replay(self, step)
        return None if logits is None else blur(logits)

    monkeypatch.setattr(GraphedDecodes, "run", noisy)
    if alike:
        monkeypatch.setattr(runner, "forward", lambda step, context: blur(forward(step, context)))
    assert (try_graphs(runner) == "") == passes == (runner.graphs is not None)


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
        try_graphs(runner)


def test_an_error_on_a_sharded_model_ends_the_start(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may wait in a collective for this one, so it must not go on with other steps."""
    runner, _ = graphed(half)
    runner.loaded = replace(half, ranks=2)
    fail_replays(monkeypatch)
    with pytest.raises(RuntimeError, match="the replay failed"):
        try_graphs(runner)


def test_a_cache_that_is_too_small_for_the_trial_has_no_graphs(half: LoadedModel) -> None:
    runner, _ = graphed(half, pages=3)
    assert "the trial needs" in try_graphs(runner) and runner.graphs is None


def test_a_draft_models_graphs_are_tried_too(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference turns off the graphs of both models."""
    runner, _ = graphed(half)
    drafts, recorder = ModelRunner(half, filled_backend(half, 120)), Replayed()
    runner.drafter = Drafter(drafts.forward, half, drafts.backend, 500)
    graphs = runner.drafter.graphs = graphs_for(drafts.forward, drafts.backend, 4, CONTEXT, recorder)
    assert graphs is not None
    graphs.capture()
    assert try_graphs(runner) == ""
    assert recorder.replays and runner.drafter.graphs is graphs
    monkeypatch.setattr(graphs, "run", lambda step: torch.zeros(len(step.sampling), 500))
    assert "of the draft model, 1 decodes: it is on average" in try_graphs(runner)
    assert runner.graphs is None and runner.drafter.graphs is None


def test_graphs_of_joined_rows_are_tried(half: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _ = graphed(half, verifies=True)
    sizes = replayed_sizes(monkeypatch)
    assert try_graphs(runner) == ""
    assert {size for size, _, joins in sizes if joins} == {2, 4, 6} and {size for size, _, joins in sizes if not joins} == {1, 2, 4, 6}
    monkeypatch.setattr(graphs_module, "join_rows", lambda step: replace(step, starts=[0] * len(step.starts)))
    runner, _ = graphed(half, verifies=True)
    assert "CUDA graphs failed the start-up trial" in try_graphs(runner)


def test_a_loaded_adapter_is_tried_beside_rows_without_one(half: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = AdapterSet(half, 2, 8)
    adapters.allocate_slots()
    adapters.load(1, "a", "file:///a", write_adapter(half, tmp_path / "a", 1, 4, scale=0.2))
    try:
        runner, _ = graphed(half, adapters)
        assert try_graphs(runner, adapter=1) == "" and runner.graphs is not None
        monkeypatch.setattr(graphs_module.GraphedDecodes, "_slots_of", lambda self, step: [2] * len(step.adapters) if step.adapters else ())
        assert "decodes with adapters: it is" in try_graphs(runner, adapter=1) and runner.graphs is None
    finally:
        adapters.unload(1)
