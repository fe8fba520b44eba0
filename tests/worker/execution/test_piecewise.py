"""Steps padded to piecewise graphs, on FlashInfer interpreted: they equal plain steps, and padding touches no request's page."""

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu.batches import packed, steps
from tests.worker.cuda import planted_pieces
from tests.worker.execution.replayed import KERNELS, PAGE, PAGES, Replayed, filled_backend

from fairlead.random_model import make_model
from fairlead_worker.execution import runner_builder as runner_module
from fairlead_worker.execution.adapted import AdaptedForward
from fairlead_worker.execution.cuda_graphs import piecewise
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, PiecewiseGraphs, record_pieces
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.kernels import flashinfer
from fairlead_worker.kernels.base import PackedStep
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.scheduler.config import SchedulerConfig

SIZES = (4, 8, 16, 32)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("pieces") / "llama"
    make_model(folder, arch="llama", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=2, vocab=500)
    return load_model(str(folder), dtype="float16")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piecewise, "SIZES", SIZES)
    monkeypatch.setattr(piecewise, "SLACK", float("inf"))  # this machine may be busy


def recorded(
    loaded: LoadedModel, most: int = 32, adapters: AdapterSet | None = None, pages: int = PAGES
) -> tuple[ModelRunner, PieceSizes, Replayed]:
    runner, recorder, sizes = ModelRunner(loaded, filled_backend(loaded, pages), adapters=adapters), Replayed(), PieceSizes(most)
    runner.graphs = graphs_for(runner.forward, runner.backend, 1, 100, recorder)
    assert runner.graphs is not None
    runner.graphs.capture()
    runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, 100, sizes)
    return runner, sizes, recorder


def random_steps(loaded: LoadedModel, seed: int) -> Iterator[PackedStep]:
    """Yield prompts, chunks and decodes of up to 32 tokens, and steps without a sampled token."""
    drawn = random.Random(seed)
    spec = filled_backend(loaded).spec
    for number, step in enumerate(steps(spec, PAGES, drawn, count=8, longest=9, requests=4)):
        tokens = len(step.tokens)
        sampled = sorted(drawn.sample(range(tokens), min(tokens, number % 3)))
        yield replace(
            step, tokens=torch.tensor([drawn.randrange(500) for _ in range(tokens)]), sampling=torch.tensor(sampled, dtype=torch.int64)
        )


@torch.inference_mode()
def test_replays_are_plain_steps(loaded: LoadedModel) -> None:
    """Steps of every size take turns, so that one would read what another left in the memory that they share."""
    plain, (graphed, _, recorder) = ModelRunner(loaded, filled_backend(loaded)), recorded(loaded)
    assert recorder.recorded == [1, 32, 16, 8, 4], "the largest first"
    assert graphed.pieces is not None
    padded = full = 0
    for seed in range(4):
        for step in random_steps(loaded, seed):
            expected, replayed = plain.run(step), graphed.pieces.run(step)
            tokens = len(step.tokens)
            assert (replayed is not None) == (tokens <= 32)
            full, padded = full + (tokens in SIZES), padded + (tokens not in SIZES)
            got = graphed.run(step) if replayed is None else replayed
            torch.testing.assert_close(got, expected, rtol=0, atol=0.02)
            for layer in range(2):
                for mine, theirs in ((graphed.backend.keys, plain.backend.keys), (graphed.backend.values, plain.backend.values)):  # type: ignore[attr-defined]  # FlashInfer's
                    torch.testing.assert_close(mine[layer][:PAGES], theirs[layer][:PAGES], rtol=0, atol=0.02)
    assert full > 2 and padded > 10 and len(set(recorder.replays)) == 4


@torch.inference_mode()
def test_numbers_of_padding_are_finite_whatever_was_there(loaded: LoadedModel) -> None:
    """Attention does not write them, and a number that is none reaches the routing of experts and scales of float8 (tokenspeed#741)."""
    runner, _, _ = recorded(loaded)
    assert runner.pieces is not None
    for output in runner.pieces._outputs.values():
        output.fill_(float("nan"))
    step = packed([(0, 5)], [[0, 1]], PAGE, torch.device("cpu"))
    assert runner.pieces.run(step) is not None
    states = runner.pieces._replays[8]()
    assert len(states) == 8 and bool(states.isfinite().all())


@torch.inference_mode()
def test_a_layer_launches_its_attention_and_one_graph(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers: three pieces, and between them one attention for a chunk, two for decodes beside a chunk."""
    runner, _, _ = recorded(loaded)
    launched = list[str]()
    backend_run = flashinfer.FlashInferBackend.run
    monkeypatch.setattr(flashinfer.FlashInferBackend, "run", lambda *args: launched.append("attention") or backend_run(*args))
    monkeypatch.setattr(flashinfer.FlashInferBackend, "store", lambda *args: launched.append("store"))
    for rows, each in (([(0, 5)], 1), ([(3, 1), (7, 1), (0, 5)], 2)):
        launched.clear()
        step = packed(rows, [[2 * row, 2 * row + 1] for row in range(len(rows))], PAGE, torch.device("cpu"))
        assert runner.run(step).shape == (0, 500)
        assert launched == ["attention"] * each * 2


def test_only_sizes_that_wait_for_their_launches_are_recorded(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms of launches; a token takes 1 ms. A size is measured once, and not beyond the first that the device bounds."""
    measured = list[int]()

    def time(self: PiecewiseGraphs, size: int) -> tuple[float, float]:
        measured.append(size)
        return 0.010, max(0.0105, size * 0.001)

    monkeypatch.setattr(piecewise, "SLACK", 1.1)
    monkeypatch.setattr(PiecewiseGraphs, "_time", time)
    _, sizes, recorder = recorded(loaded)
    assert sizes.chosen == [4, 8] and recorder.recorded == [1, 8, 4] and measured == [4, 8, 16]
    monkeypatch.setattr(PiecewiseGraphs, "_time", lambda self, size: (0.001, 0.1))
    runner, sizes, _ = recorded(loaded)
    assert runner.pieces is None and sizes.chosen == [] and not sizes.failure
    _, sizes, _ = recorded(loaded, most=3)
    assert sizes.chosen == []


def test_the_time_of_a_plain_step_is_that_of_its_launches_and_that_of_its_kernels(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shortest of several turns counts, after one that warms up."""
    runner, _, _ = recorded(loaded)
    assert runner.pieces is not None
    now, turns = [0.0], iter([9.0, 3.0, 2.0, 4.0])

    def body(*_: Any) -> None:
        now[0] += next(turns)

    def wait(self: PiecewiseGraphs) -> None:
        now[0] += 0.5

    monkeypatch.setattr(piecewise.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(PiecewiseGraphs, "_wait", wait)
    monkeypatch.setattr(type(runner.forward), "run_body", body)
    assert runner.pieces._time(8) == (2.0, 2.5)


@torch.inference_mode()
def test_a_recording_that_takes_too_long_ends(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Small steps are padded to the sizes that there are."""
    seconds = iter(range(0, 1000, 9))
    monkeypatch.setattr(piecewise.time, "monotonic", lambda: next(seconds))
    runner, sizes, _ = recorded(loaded)
    assert runner.pieces is not None and sizes.chosen == runner.pieces.sizes == [16, 32]
    assert "for less than 16 tokens are not recorded" in caplog.text
    assert runner.pieces.run(packed([(0, 3)], [[0]], PAGE, torch.device("cpu"))) is not None


@torch.inference_mode()
def test_steps_with_adapters_have_no_pieces(loaded: LoadedModel) -> None:
    runner, _, _ = recorded(loaded, adapters=AdapterSet(loaded, 2, 8))
    assert isinstance(runner.forward, AdaptedForward) and runner.pieces is not None
    step = packed([(0, 5), (0, 3)], [[0, 1], [2]], PAGE, torch.device("cpu"))
    assert runner.pieces.run(step) is not None and runner.pieces.run(replace(step, adapters=[0, 1])) is None


@pytest.mark.parametrize("fault", ["a head that cannot run alone", "an operation that waits"])
@torch.inference_mode()
def test_what_cannot_be_recorded_runs_without(fault: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    runner = ModelRunner(loaded, filled_backend(loaded))
    recorder, sizes = Replayed(), PieceSizes(8)
    runner.graphs = graphs_for(runner.forward, runner.backend, 1, 100, recorder)
    assert runner.graphs is not None
    runner.graphs.capture()
    if fault.startswith("a head"):
        runner.forward.can_score = False
    else:
        run_body = type(runner.forward).run_body  # type: ignore[attr-defined]  # of layers
        monkeypatch.setattr(type(runner.forward), "run_body", lambda self, *args: (made := run_body(self, *args), made.max().item())[0])
    runner.pieces = record_pieces(runner.graphs, runner.forward, runner.backend, 100, sizes)
    assert runner.pieces is None and sizes.failure.startswith("steps with prompts cannot be recorded: ")
    assert "run without CUDA graphs" in caplog.text and runner.graphs.is_recorded
    assert record_pieces(runner.graphs, runner.forward, runner.backend, 100, sizes) is None, "it is not tried again"
    step = packed([(0, 5)], [[0, 1]], PAGE, torch.device("cpu"))
    assert runner.run(replace(step, sampling=torch.tensor([4]))).shape == (1, 500)


class Memory:
    """A device that holds recorded graphs, and what the first recording leaves for good."""

    total = (256 << 20) + (16 << 20)  # the first part is kept free in any case
    graph_bytes = 1 << 20
    kept_bytes = 0

    def __init__(self) -> None:
        self.graphs = self.kept = 0
        self.recorder = Replayed()

    def record(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return self._counted(self.recorder.record(run))

    def record_pieces(self, run: Any) -> Any:
        return self._counted(self.recorder.record_pieces(run))

    def _counted(self, replay: Any) -> Any:
        self.graphs += 1
        self.kept = self.kept_bytes
        weakref.finalize(replay, lambda: setattr(self, "graphs", self.graphs - 1))
        return replay

    def free(self) -> int:
        gc.collect()
        return self.total - self.kept - self.graphs * self.graph_bytes

    def peak_of(self, run: Callable[[], None]) -> int:
        run()
        return 1 << 20


def test_pieces_have_their_memory_before_pages_do(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, quick_collections: None) -> None:
    """Their sizes are chosen once, from steps that the scheduler may plan: the next choice could need more than was measured."""
    memory, chosen = Memory(), list[int]()
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=memory))
    choose = PiecewiseGraphs.choose_sizes
    monkeypatch.setattr(PiecewiseGraphs, "choose_sizes", lambda self, most: chosen.append(most) or choose(self, most))
    steps = SchedulerConfig(64, max_num_seqs=4, chunked_prefill_size=16)
    made = RunnerBuilder(
        loaded=loaded,
        page_size=PAGE,
        backend="flashinfer",
        steps=steps,
        graph_rows=1,
        piece_tokens=32,
        mem_fraction_static=1.0,
        memory=memory,
    ).build()
    assert chosen == [20], "16 of a chunk beside 4 decodes"
    assert memory.recorder.recorded == [1, 16, 8, 4, 1, 16, 8, 4], "measured, given back, made"
    assert made.pieces is not None and made.pieces.sizes == [4, 8, 16] and memory.graphs == 4
    assert made.backend.pages == ((16 << 20) - (1 << 20) - 4 * memory.graph_bytes) // made.backend.spec.page_bytes
    del made
    assert memory.free() == memory.total, "the pieces are in a cycle, which is collected"


def test_the_trial_runs_every_size_full_and_padded(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, _, _ = recorded(loaded, pages=120)
    assert runner.pieces is not None
    tried, run = set[int](), PiecewiseGraphs.run

    def counted(self: PiecewiseGraphs, step: PackedStep) -> torch.Tensor | None:
        tried.add(len(step.tokens) if max(step.counts) > 1 else 0)
        return run(self, step)

    monkeypatch.setattr(PiecewiseGraphs, "run", counted)
    pieces = runner.pieces
    assert try_graphs(runner) == "" and runner.pieces is pieces
    assert {2, 4, 6, 8, 10, 16, 18, 32} <= tried


@pytest.mark.parametrize(
    "plant",
    [
        planted_pieces.fresh_output,
        planted_pieces.padding_on_the_first_page,
    ],
    ids=lambda plant: plant.__name__,
)
def test_the_trial_turns_off_pieces_that_give_other_numbers_and_nothing_else(
    plant: Callable[[pytest.MonkeyPatch], None], loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    runner, _, _ = recorded(loaded, most=8)
    failure = try_graphs(runner)
    assert runner.pieces is None and runner.graphs is not None
    assert failure.startswith("piecewise CUDA graphs failed the start-up trial and are off: ")


def test_pieces_that_raise_are_off(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: PiecewiseGraphs, step: PackedStep) -> torch.Tensor | None:
        raise RuntimeError("CUDA error: the replay failed")

    monkeypatch.setattr(PiecewiseGraphs, "run", fail)
    runner, _, _ = recorded(loaded, most=4)
    assert "the replay failed" in try_graphs(runner) and runner.pieces is None and runner.graphs is not None


def test_a_few_graphs_are_recorded_for_the_memory_of_all(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, quick_collections: None
) -> None:
    """The others take as much as the second largest. What the first recording leaves for good counts once."""
    memory = Memory()
    memory.kept_bytes = 2 << 20
    monkeypatch.setattr(flashinfer, "library", lambda: KERNELS)
    monkeypatch.setattr(runner_module, "graphs_for", partial(graphs_for, recorder=memory))
    made = RunnerBuilder(
        loaded=loaded,
        page_size=PAGE,
        backend="flashinfer",
        steps=SchedulerConfig(64, max_num_seqs=24, chunked_prefill_size=16),
        graph_rows=24,
        mem_fraction_static=1.0,
        memory=memory,
    ).build()
    sizes = [24, 16, 8, 4, 2, 1]
    assert memory.recorder.recorded == [*sizes[:3], *sizes[:2], sizes[0], *sizes]
    assert memory.graphs == len(sizes)
    room = (16 << 20) - (1 << 20) - memory.kept_bytes - len(sizes) * memory.graph_bytes
    assert made.backend.pages == room // made.backend.spec.page_bytes
