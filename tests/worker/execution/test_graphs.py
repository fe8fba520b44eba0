"""Decodes padded to a graph's size, on FlashInfer interpreted: a replay equals a plain step, and padding touches no request's page."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.gpu.batches import packed
from tests.worker.execution.replayed import PAGE, PAGES, Replayed, decodes, filled_backend

from fairlead.random_model import make_model
from fairlead_worker.execution.cuda_graphs.decodes import batch_sizes, graphs_for
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.sizing import measure_allocation
from fairlead_worker.kernels.base import KVSpec, PackedStep, StepContext
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.model.loader import LoadedModel, load_model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("graphs") / "llama"
    make_model(folder, arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=2, vocab=500)
    return load_model(str(folder), dtype="float16")


def runners(loaded: LoadedModel) -> tuple[ModelRunner, ModelRunner, Replayed]:
    plain, graphed, recorder = ModelRunner(loaded, filled_backend(loaded)), ModelRunner(loaded, filled_backend(loaded)), Replayed()
    graphed.graphs = graphs_for(graphed.forward, graphed.backend, 12, 100, recorder)
    assert graphed.graphs is not None
    graphed.graphs.capture()
    return plain, graphed, recorder


def test_sizes_grow_so_that_little_is_filled_up() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100]
    assert all(b <= 2 * a for most in range(1, 300) for a, b in zip(batch_sizes(most), batch_sizes(most)[1:], strict=False))


def test_the_largest_is_recorded_first(loaded: LoadedModel) -> None:
    told: list[tuple[str, int]] = []
    made = graphs_for(ModelRunner(loaded, filled_backend(loaded)).forward, filled_backend(loaded), 12, 100, Replayed())
    assert made is not None
    recorder = made.recorder = Replayed()
    made.capture(lambda phase, percent, *_, **__: told.append((phase, percent)))
    assert recorder.recorded == [12, 8, 4, 2, 1]
    assert told == [("capture", 0), ("capture", 20), ("capture", 40), ("capture", 60), ("capture", 80), ("capture", 100)]


@torch.inference_mode()
def test_replays_are_plain_steps(loaded: LoadedModel) -> None:
    """Large and small batches alternate, so that a batch would read what another left in a graph's memory."""
    plain, graphed, _ = runners(loaded)
    for seed, rows in enumerate((12, 3, 5, 1, 9, 12, 2, 11, 7)):
        step = decodes(rows, seed)
        expected = plain.run(step)
        assert graphed.graphs is not None and graphed.graphs.run(step) is not None
        torch.testing.assert_close(graphed.run(step), expected, rtol=0, atol=0.02)
        for layer in range(2):
            for mine, theirs in ((graphed.backend.keys, plain.backend.keys), (graphed.backend.values, plain.backend.values)):  # type: ignore[attr-defined]  # FlashInfer's
                torch.testing.assert_close(mine[layer][:PAGES], theirs[layer][:PAGES], rtol=0, atol=0.02)


@torch.inference_mode()
def test_guesses_are_replayed_as_rows_of_their_own(loaded: LoadedModel) -> None:
    """Each row sees the keys of those before it, which the same step stores, across a page boundary."""
    plain, graphed, _ = runners(loaded)
    assert graphed.graphs is not None
    guessed = [(2, 1), (3, 1), (4, 1), (7, 1), (0, 1)]
    step = packed(guessed, [[5], [5], [5, 9], [0, 1], [3]], PAGE, torch.device("cpu"))
    step = replace(step, tokens=torch.tensor([7, 9, 11, 13, 15]), sampling=torch.arange(5))
    expected, replayed = plain.run(step), graphed.graphs.run(step)
    assert replayed is not None
    torch.testing.assert_close(replayed, expected, rtol=0, atol=0.02)


@torch.inference_mode()
def test_other_steps_have_no_graph(loaded: LoadedModel) -> None:
    plain, graphed, _ = runners(loaded)
    graphs = graphed.graphs
    assert graphs is not None
    step = decodes(3, 1)
    for other in (decodes(13, 1), replace(step, adapters=[0, 1, 0]), replace(step, sampling=torch.arange(2))):
        assert graphs.run(other) is None
    mixed = packed([(0, 5), (3, 1)], [[0, 1], [2]], PAGE, torch.device("cpu"))
    mixed = replace(mixed, sampling=torch.tensor([4, 5]))
    assert graphs.run(mixed) is None
    torch.testing.assert_close(graphed.run(mixed), plain.run(mixed))


@torch.inference_mode()
def test_what_cannot_be_recorded_runs_without(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner(loaded, filled_backend(loaded))
    run = runner.forward

    def waiting(step: PackedStep, context: StepContext) -> torch.Tensor:
        logits = run(step, context)
        return logits if logits.max().item() > -1e9 else -logits

    runner.graphs = graphs_for(waiting, runner.backend, 4, 100, Replayed())  # type: ignore[arg-type]  # a call is all of it
    assert runner.graphs is not None
    runner.graphs.capture()
    assert "without CUDA graphs" in caplog.text and "capturing" in caplog.text
    step = decodes(3, 1)
    assert runner.graphs.run(step) is None
    assert runner.run(step).shape == (3, 500)


def test_no_graphs_on_other_backends_and_devices(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    runner = ModelRunner(loaded, filled_backend(loaded))
    assert graphs_for(runner.forward, runner.backend, 8, 100) is None, "no GPU"
    assert graphs_for(runner.forward, runner.backend, 0, 100, Replayed()) is None
    deterministic = filled_backend(loaded)
    deterministic.batch_invariant = True
    assert graphs_for(runner.forward, deterministic, 8, 100, Replayed()) is None, "its decodes are prefills"
    spec = KVSpec(loaded.layers, PAGE, loaded.dtype, loaded.device)
    assert graphs_for(runner.forward, ReferenceBackend(spec, PAGES), 8, 100, Replayed()) is None
    assert "attention is reference" in caplog.text


def test_a_failed_capture_keeps_no_graph(loaded: LoadedModel) -> None:
    """Nor those of joined rows, which were recorded before it: their memory would be lost."""

    class FailsAt4(Replayed):
        def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            replay = super().record(run)
            if self.recorded[-1] == 4:
                raise RuntimeError("out of memory")
            return replay

    runner = ModelRunner(loaded, filled_backend(loaded))
    graphs = graphs_for(runner.forward, runner.backend, 8, 100, FailsAt4(), verifies=True)
    assert graphs is not None
    graphs.capture()
    assert "a step of 4 decodes" in graphs.failure and not graphs._graphs and not graphs._verifications


@torch.inference_mode()
def test_drafted_tokens_are_replayed_as_joined_rows(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves any division of its tokens into requests; decodes alone use the other graph of their size."""
    plain, graphed, recorder = ModelRunner(loaded, filled_backend(loaded)), ModelRunner(loaded, filled_backend(loaded)), Replayed()
    graphed.graphs = graphs_for(graphed.forward, graphed.backend, 8, 100, recorder, verifies=True)
    assert graphed.graphs is not None
    graphed.graphs.capture()
    assert recorder.recorded == [8, 8, 4, 4, 2, 2, 1]
    drawn = torch.Generator().manual_seed(2)
    for divided, graph in (([3, 1, 4], 1), ([1, 5], 1), ([2], 5), ([1, 1, 1], 2), ([2, 2, 2, 2], 1), ([3], 3), ([8], 1)):
        rows, tables = [], []
        for request, tokens in enumerate(divided):
            start = int(torch.randint(0, 2 * PAGE, (1,), generator=drawn))
            rows += [(start + place, 1) for place in range(tokens)]
            tables += [list(range(4 * request, 4 * request + 4))] * tokens
        step = packed(rows, tables, PAGE, torch.device("cpu"))
        step = replace(step, tokens=torch.randint(0, 500, (len(rows),), generator=drawn), sampling=torch.arange(len(rows)))
        with monkeypatch.context() as patch:  # a row for each token
            patch.setattr("fairlead_worker.kernels.flashinfer.join_rows", lambda _: None)
            expected = plain.run(step)
        torch.testing.assert_close(graphed.run(step), expected, rtol=0, atol=0.02)
        assert recorder.replays[-1] == graph, divided


def test_memory_that_graphs_keep_is_counted_and_given_back() -> None:
    class Memory:
        total, held = 1000, 0

        def free(self) -> int:
            return self.total - self.held

        def peak_of(self, run: Callable[[], None]) -> int:
            raise AssertionError

    class Graphs:
        def __init__(self) -> None:
            memory.held += 120

        def __del__(self) -> None:
            memory.held -= 120

    memory = Memory()
    assert measure_allocation(memory, Graphs) == 120
    assert memory.free() == 1000
