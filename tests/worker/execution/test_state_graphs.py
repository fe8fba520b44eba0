"""Recurrent states in graphs of decodes, on FlashInfer interpreted: a replay equals a plain step, with its states and snapshots."""

from dataclasses import replace

import pytest
import torch
from bench.gpu.batches import packed
from tests.models import save_model
from tests.worker.execution.replayed import KERNELS, PAGE, Replayed

from fairlead_worker.cache.states import PREVIOUS, ZEROS, RowState, StateSlots
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.kernels.base import KVSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.states import StatefulBackend, StateStore
from fairlead_worker.model.loader import LoadedModel, load_model

PAGES, CPU = 60, torch.device("cpu")
SLOTS = StateSlots(6, 10, 0)


@pytest.fixture(scope="module", params=["qwen3_next", "falcon_h1", "jamba"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder, hidden_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    return load_model(str(folder), dtype="float16")


def make_runner(loaded: LoadedModel) -> ModelRunner:
    attention = FlashInferBackend(KVSpec(loaded.layers, PAGE, loaded.dtype, loaded.device), PAGES, KERNELS)
    return ModelRunner(loaded, StatefulBackend(attention, StateStore(loaded.states, SLOTS, loaded.device)))


def make_step(rows: list[tuple[int, int, int]], states: list[RowState | None], seed: int) -> PackedStep:
    """Rows as (request, start, count), each request on pages of its own."""
    drawn = torch.Generator().manual_seed(seed)
    step = packed([row[1:] for row in rows], [list(range(10 * row[0], 10 * row[0] + 10)) for row in rows], PAGE, CPU)
    ends = torch.tensor([count for _, _, count in rows]).cumsum(0) - 1
    return replace(step, tokens=torch.randint(0, 500, (len(step.tokens),), generator=drawn), sampling=ends, states=states)


@torch.inference_mode()
def test_a_replay_advances_the_states_as_a_plain_step(loaded: LoadedModel) -> None:
    """Requests swap slots between steps, one starts from a snapshot, and batches of several sizes alternate."""
    plain, graphed, recorder = make_runner(loaded), make_runner(loaded), Replayed()
    graphed.graphs = graphs_for(graphed.forward, graphed.backend, 4, 40, recorder)
    assert graphed.graphs is not None
    graphed.graphs.capture()
    assert graphed.graphs.is_recorded, graphed.graphs.failure
    steps = [
        make_step([(0, 0, 9), (1, 0, 5), (2, 0, 5)], [RowState(0, ZEROS), RowState(1, ZEROS, ((5, 7),)), RowState(2, ZEROS)], 1),
        make_step([(0, 9, 1), (1, 5, 1), (2, 5, 1)], [RowState(0, 0), RowState(1, 1), RowState(2, 2, ((1, 8),))], 2),
        make_step([(1, 6, 1)], [RowState(4, 1)], 3),  # in another slot from now on
        make_step([(2, 6, 1), (1, 7, 1), (0, 10, 1), (3, 0, 1)], [RowState(1, 2), RowState(2, 4), RowState(5, 0), RowState(0, ZEROS)], 4),
        make_step([(2, 6, 1), (3, 1, 1)], [RowState(3, 8, ((1, 9),)), None], 5),  # from the snapshot; and one that keeps nothing
        make_step([(2, 7, 1), (2, 8, 1), (0, 11, 1)], [RowState(6, 3), RowState(7, PREVIOUS), RowState(5, 5)], 6),
    ]
    for number, step in enumerate(steps):
        expected = plain.run(step)
        torch.testing.assert_close(graphed.run(step), expected, rtol=0, atol=0.02)
        assert len(recorder.replays) == min(number, 4), "all but the prompts, and the row that speculates"
        mine, theirs = (runner.backend.store.layers for runner in (graphed, plain))  # type: ignore[attr-defined]  # with states
        for one, other in zip(mine, theirs, strict=True):
            for part, same in zip(one, other, strict=True):
                torch.testing.assert_close(part[: SLOTS.total + 1], same[: SLOTS.total + 1], rtol=0, atol=0.02)
                assert not part[SLOTS.total].any(), "the slot of zeros stays zero"


def test_the_trial_runs_the_graphs(loaded: LoadedModel) -> None:
    runner = make_runner(loaded)
    runner.graphs = graphs_for(runner.forward, runner.backend, 4, 40, Replayed())
    assert runner.graphs is not None
    runner.graphs.capture()
    assert try_graphs(runner) == "" and runner.graphs is not None
