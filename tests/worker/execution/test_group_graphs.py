"""Layers in groups, and latents, on FlashInfer interpreted: each group has its own plan and page tables, in plain steps and in graphs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.gpu.batches import packed
from tests.models import save_model
from tests.worker.execution.replayed import KERNELS, PAGE, Replayed

from fairlead.random_model import make_model
from fairlead_worker.execution.cuda_graphs.decodes import graphs_for
from fairlead_worker.execution.cuda_graphs.piecewise import PieceSizes, record_pieces
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.trial import try_graphs
from fairlead_worker.kernels.base import Backend, GroupPages, KVSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.groups import choose_groups
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.model.loader import LoadedModel, load_model

PAGES, WINDOW = 160, 9


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("groups") / "gemma3"
    make_model(folder, arch="gemma3", hidden=128, heads=2, kv_heads=1, head_dim=64, layers=3, vocab=500, sliding_window=WINDOW)
    return load_model(str(folder), dtype="float16")


def spec_of(loaded: LoadedModel) -> KVSpec:
    spec = KVSpec(loaded.layers, PAGE, loaded.dtype, loaded.device)
    groups, _ = choose_groups(spec, 64, has_draft=False)
    return replace(spec, groups=groups)


def filled(backend: Backend) -> Backend:
    drawn = torch.Generator().manual_seed(3)
    backend.write_pages(torch.arange(PAGES), torch.randn(PAGES, backend.spec.page_width, generator=drawn).to(backend.spec.copy_dtype))
    return backend


def make_step(rows: list[tuple[int, int]], seed: int, spec: KVSpec) -> PackedStep:
    """Return rows (start, count) on pages of their own in every group, which follow no rule. What is behind a window names page 0."""
    drawn = torch.Generator().manual_seed(seed)
    order = iter(torch.randperm(PAGES - 1, generator=drawn).add(1).tolist())
    each = []
    for group in range(spec.num_groups):
        tables = []
        for start, count in rows:
            first = max(0, start - WINDOW + 1) // PAGE if group else 0
            tables.append([0] * first + [next(order) for _ in range(-(-(start + count) // PAGE) - first)])
        each.append(packed(rows, tables, PAGE, spec.device))
    tokens = torch.randint(0, 500, (len(each[0].tokens),), generator=drawn)
    ends = torch.tensor([count for _, count in rows]).cumsum(0) - 1
    return replace(each[0], tokens=tokens, sampling=ends, others=[GroupPages(part.slots, part.page_indices) for part in each[1:]])


STEPS = [[(23, 1), (5, 1), (0, 1), (12, 1)], [(30, 1)], [(0, 19)], [(7, 1), (25, 1), (16, 6), (0, 3)]]
DRAFTED = [(10, 1), (11, 1), (12, 1), (3, 1)]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("latents")
    save_model("deepseek_v3", folder, kv_lora_rank=512, qk_rope_head_dim=64, max_position_embeddings=64)
    return load_model(str(folder), dtype="float16")


@pytest.mark.parametrize(("model", "groups", "kinds"), [("loaded", 3, 2), ("latents", 1, 1)])
@torch.inference_mode()
def test_graphs_replay_plain_steps(model: str, groups: int, kinds: int, request: pytest.FixtureRequest) -> None:
    loaded = request.getfixturevalue(model)
    spec, recorder = spec_of(loaded), Replayed()
    assert spec.num_groups == groups and len(set(spec.layers)) == kinds
    oracle = ModelRunner(loaded, filled(ReferenceBackend(spec, PAGES + 1)))
    plain, graphed = (ModelRunner(loaded, filled(FlashInferBackend(spec, PAGES, KERNELS))) for _ in range(2))
    graphed.graphs = graphs_for(graphed.forward, graphed.backend, 4, 64, recorder, verifies=True)
    assert graphed.graphs is not None
    graphed.graphs.capture()
    graphed.pieces = record_pieces(graphed.graphs, graphed.forward, graphed.backend, 64, PieceSizes(32, [16, 32]))
    assert graphed.pieces is not None and graphed.pieces.sizes == [16, 32]
    for seed, rows in enumerate(STEPS):
        step = make_step(rows, seed, spec)
        expected = oracle.run(step)
        torch.testing.assert_close(plain.run(step), expected, rtol=0, atol=0.02)
        done = len(recorder.replays)
        torch.testing.assert_close(graphed.run(step), expected, rtol=0, atol=0.02)
        assert len(recorder.replays) == done + 1
        for mine, theirs in zip(graphed.backend.keys, oracle.backend.keys, strict=True):  # type: ignore[attr-defined]  # both have them
            torch.testing.assert_close(mine[1:PAGES], theirs[1:PAGES], rtol=0, atol=0.02)


@torch.inference_mode()
def test_drafted_tokens_are_joined_in_every_group(loaded: LoadedModel) -> None:
    spec, recorder = spec_of(loaded), Replayed()
    oracle = ModelRunner(loaded, filled(ReferenceBackend(spec, PAGES + 1)))
    plain, graphed = (ModelRunner(loaded, filled(FlashInferBackend(spec, PAGES, KERNELS))) for _ in range(2))
    graphed.graphs = graphs_for(graphed.forward, graphed.backend, 4, 64, recorder, verifies=True)
    assert graphed.graphs is not None
    graphed.graphs.capture()
    whole = make_step([(10, 3), (3, 1)], 5, spec)
    lengths = [-(-(start + 1) // PAGE) for start, _ in DRAFTED]

    def rows_of(pages: GroupPages, indptr: torch.Tensor) -> GroupPages:
        tables = [pages.page_indices[: int(indptr[1])], pages.page_indices[int(indptr[1]) :]]
        parts = [tables[place == 3][:length] for place, length in enumerate(lengths)]
        return GroupPages(pages.slots, torch.cat(parts))

    first, *others = (rows_of(each, whole.page_indptr) for each in (GroupPages(whole.slots, whole.page_indices), *whole.others))
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    starts, counts = [start for start, _ in DRAFTED], [1] * 4
    step = replace(whole, starts=starts, counts=counts, page_indptr=indptr, sampling=torch.arange(4)).with_pages(first, others)
    expected = oracle.run(step)
    for runner in (plain, graphed):
        torch.testing.assert_close(runner.run(step), expected, rtol=0, atol=0.02)
    assert len(recorder.replays) == 1


def test_the_trial_runs_the_graphs_of_groups(loaded: LoadedModel) -> None:
    runner = ModelRunner(loaded, FlashInferBackend(spec_of(loaded), 3 * PAGES, KERNELS))
    runner.graphs = graphs_for(runner.forward, runner.backend, 4, 64, Replayed())
    assert runner.graphs is not None
    runner.graphs.capture()
    assert try_graphs(runner) == "" and runner.graphs is not None
