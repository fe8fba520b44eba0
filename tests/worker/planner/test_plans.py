"""FlashInfer's real planner with our real arguments: what a CUDA graph keeps never changes, and every plan fits the workspaces."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from types import ModuleType

import numpy as np
import pytest
import torch
from bench.gpu.kernels import ENVIRONMENT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.worker.planner.library import Device, Plan, PlanFailed, Planner, PlanningLibrary, compile_planner, flashinfer_modules

from fairlead_worker.kernels import flashinfer as backend_module
from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.kernels.flashinfer import FlashInferBackend, count_decodes
from fairlead_worker.kernels.paging import Paging, plan_pages

META = torch.device("meta")
A100, H100, H200_MIG, B200 = Device(108, 167936, 166912), Device(132), Device(60), Device(148)
MOST_PAGES = 100_000
"""Of all rows together, so that a plan takes milliseconds."""
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LARGE = LayerSpec(128, 32, 256, 256, 0.1)
"""512 decodes of it in a graph need 336 MB, eager steps 138 MB."""


@dataclass(frozen=True)
class Case:
    """A layer kind on a device. `pages`: tokens in a page."""

    kind: LayerSpec
    pages: int = 16
    device: Device = H100


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    group = draw(st.sampled_from([group for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 48, 71, 128) if group * kv_heads <= 128]))
    dim = draw(st.sampled_from((64, 128, 256)))
    window = draw(st.none() | st.integers(1, 40_000))
    device = draw(st.sampled_from((A100, H100, H200_MIG, B200)))
    registers = draw(st.integers(24, 128))
    kind = LayerSpec(kv_heads * group, kv_heads, dim, dim, 0.1, window)
    return Case(
        kind,
        draw(st.sampled_from((1, 5, 16, 32, 64))),
        Device(device.processors, device.shared_per_processor, device.shared_per_block, registers),
    )


@st.composite
def lengths(draw: st.DrawFn, rows: int, pages: int) -> list[int]:
    """Tokens of each row after the step: any mixture of short and long ones."""
    most = min(draw(st.sampled_from((1, 20, 500, 9_000, 130_000))), max(1, MOST_PAGES * pages // rows))
    even = np.random.default_rng(draw(st.integers(0, 1_000))).random(rows)
    return [max(1, int(most**power)) for power in even] if draw(st.booleans()) else [max(1, int(most * share)) for share in even]


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[ModuleType]:
    if not (shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler on this machine, which FlashInfer's planner needs")
    if problem := ENVIRONMENT.install():
        pytest.skip(f"FlashInfer and CUDA's headers cannot be installed here: {problem}")
    with flashinfer_modules() as module:
        yield module


@pytest.fixture(scope="module")
def real(flashinfer: ModuleType) -> Callable[[Device], PlanningLibrary]:
    built = compile_planner()
    return lambda device: PlanningLibrary(flashinfer, Planner(built, device))


def backend_on(case: Case, library: PlanningLibrary, monkeypatch: pytest.MonkeyPatch) -> FlashInferBackend:
    monkeypatch.setattr(backend_module, "processors", lambda _: case.device.processors)
    return FlashInferBackend(KVSpec((case.kind,), case.pages, torch.bfloat16, META), 1, library)  # type: ignore[arg-type]  # stores nothing


def packed(wanted: list[int], counts: list[int], page_size: int) -> PackedStep:
    """Rows of `wanted` tokens, of which the last `counts` are computed now."""
    pages = [-(-length // page_size) for length in wanted]
    total = sum(counts)
    tokens = torch.zeros(total, dtype=torch.int64, device=META)
    return PackedStep(
        tokens=tokens,
        positions=tokens,
        slots=tokens,
        starts=[length - count for length, count in zip(wanted, counts, strict=True)],
        counts=counts,
        page_indptr=torch.from_numpy(np.concatenate(([0], np.cumsum(pages))).astype(np.int32)),
        page_indices=torch.arange(sum(pages), dtype=torch.int32),
        sampling=tokens[:0],
    )


def check_graph(case: Case, library: PlanningLibrary, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan one graph for each batch of lengths, as `execution.cuda_graphs.decodes` does."""
    backend = backend_on(case, library, monkeypatch)
    size = len(batches[0])
    ints = [torch.zeros(count, dtype=torch.int32, device=META) for count in (size + 1, size + 1, 10 * MOST_PAGES, size, size, size)]
    wrappers = backend.graph_wrappers(Paging(*ints, single=True))
    for wanted in [[1] * size, *batches]:
        step = packed(wanted, [1] * size, case.pages)
        backend.plan_graph(wrappers, plan_pages(step, case.pages))
        plan = library.planner.plans[-1]
        assert plan.graph and plan.numbers == library.planner.plans[0].numbers, (
            "a graph replays the launches of the plan it was recorded with"
        )
        check_coverage(plan, case, wanted, [1] * size)


def check_coverage(plan: Plan, case: Case, wanted: list[int], counts: list[int]) -> None:
    """Each part of each row's keys is work of one thread block, once."""
    group = case.kind.heads // case.kind.kv_heads
    decode = len(plan.numbers) == 10
    if decode:
        blocks, _, _, rows_at, parts_at, outputs_at, mask_at, chunk_at, _, split = plan.numbers
        tiles_at, tile = None, 1
    else:
        blocks, _, _, tile, rows_at, tiles_at, parts_at, _, outputs_at, chunk_at, _, _, mask_at, _, split = plan.numbers
    masked = plan.graph and (split or not decode)
    valid = sum(plan.content[mask_at : mask_at + blocks]) if masked else len(wanted) if plan.graph else blocks
    row, part = plan.ints(rows_at, valid), plan.ints(parts_at, valid)
    tiles = [0] * valid if tiles_at is None else plan.ints(tiles_at, valid)
    outputs, chunk = plan.ints(outputs_at, len(wanted) + 1), plan.ints(chunk_at, 1)[0]
    own: dict[int, list[tuple[int, int]]] = {}
    for owner, *piece in zip(row, tiles, part, strict=True):
        own.setdefault(owner, []).append((piece[0], piece[1]))
    for number, (length, count, (begin, end)) in enumerate(zip(wanted, counts, pairwise(outputs), strict=True)):
        parts = max(index for _, index in own[number]) + 1
        pieces = product(range(1 if decode else -(-count * group // tile)), range(parts))
        assert sorted(own[number]) == sorted(pieces), "each part once"
        if split:
            assert end - begin == parts * count
            seen = length if decode or case.kind.window is None else min(length, case.kind.window - 1 + tile)
            assert parts * chunk >= seen, "keys that no block reads"
        else:
            assert parts == 1


@given(data=st.data())
@PROPERTY
def test_a_graphs_plan_is_the_same_for_any_lengths(
    data: st.DataObject, real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = data.draw(cases())
    rows = data.draw(st.sampled_from((1, 2, 3, 8, 30, 128, 512)))
    batches = data.draw(st.lists(lengths(rows, case.pages), min_size=1, max_size=3))
    check_graph(case, real(case.device), batches, monkeypatch)


def check_step(
    case: Case, library: PlanningLibrary, wanted: list[int], counts: list[int], monkeypatch: pytest.MonkeyPatch, invariant: bool = False
) -> None:
    """Plan one step without a graph."""
    backend = backend_on(case, library, monkeypatch)
    backend.batch_invariant = invariant
    backend.plan(packed(wanted, counts, case.pages))
    decodes = 0 if invariant else count_decodes(counts)
    bounds = [0, decodes, len(counts)] if 0 < decodes < len(counts) else [0, len(counts)]
    for plan, (begin, end) in zip(library.planner.plans, pairwise(bounds), strict=True):
        if not invariant:
            check_coverage(plan, case, wanted[begin:end], counts[begin:end])


@given(data=st.data())
@PROPERTY
def test_the_plan_of_any_step_fits_the_workspaces(
    data: st.DataObject, real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = data.draw(cases())
    rows = data.draw(st.sampled_from((1, 2, 3, 8, 30, 128, 512)))
    wanted = data.draw(lengths(rows, case.pages))
    chunk = data.draw(st.sampled_from((1, 1, 40, 8_192)))
    first = data.draw(st.sampled_from((0, max(0, rows - 4))))  # the engine's steps have their decodes first
    counts = [min(length, chunk) if first <= place < first + 4 else 1 for place, length in enumerate(wanted)]
    check_step(case, real(case.device), wanted, counts, monkeypatch, invariant=data.draw(st.booleans()))


@pytest.mark.parametrize("dim, tile", [(64, 192), (128, 128), (256, 128)])
def test_the_prefill_kernels_of_hopper_get_every_tile_of_every_head(
    dim: int, tile: int, real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = real(H100)
    monkeypatch.setattr(backend_module, "processors", lambda _: H100.processors)
    spec = KVSpec((LayerSpec(64, 8, dim, dim, 0.1),), 16, torch.bfloat16, META)
    backend = FlashInferBackend(spec, 1, library, prefill_kernels="fa3")  # type: ignore[arg-type]  # it stores nothing
    counts = [8_192, 1_000, *[1] * 254]
    backend.plan(packed([count + 500 for count in counts], counts, spec.page_size))
    (plan,) = library.planner.plans
    work = plan.ints(plan.numbers[6], H100.processors + 1)
    assert work[-1] == 64 * sum(-(-count // tile) for count in counts)


KINDS = (LARGE, LayerSpec(4, 2, 128, 128, 0.1), LayerSpec(8, 2, 128, 128, 0.1), LayerSpec(8, 2, 128, 128, 0.1, window=1_000))


@pytest.mark.parametrize("kind", KINDS)
def test_the_examples_of_planted_faults_have_none(
    kind: LayerSpec, real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_examples(Case(kind), real(H100), monkeypatch)


def run_examples(case: Case, library: PlanningLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of few and many rows, a chunk, and steps whose keys are split."""

    def fresh() -> PlanningLibrary:
        return PlanningLibrary(library.flashinfer, Planner(library.planner.library, case.device))

    for rows in (4, 512):
        short, long = [1 + place % 7 for place in range(rows)], [5 + 737 * (place + 1) % 3_000 for place in range(rows)]
        check_graph(case, fresh(), [short, long], monkeypatch)
    for wanted, counts in (([9_000], [8_192]), ([90_000], [1]), ([9_000, 50], [40, 1])):
        check_step(case, fresh(), wanted, counts, monkeypatch)


PLANTED_HERE = {
    "graphs share the workspace of eager steps": ("graph_workspace_bytes", lambda kinds, rows, processors: 0),
    "partial results of one query a block": ("workspace_bytes", lambda kinds, processors: 2 * processors * kinds[0].value_dim * 4),
}


@pytest.mark.parametrize("fault", PLANTED_HERE)
def test_a_workspace_that_is_too_small_is_found(
    fault: str, real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, function = PLANTED_HERE[fault]
    monkeypatch.setattr(backend_module, name, function)
    with pytest.raises(PlanFailed, match="Increase the workspace buffer size"):
        run_examples(Case(LARGE), real(H100), monkeypatch)


def test_a_graph_that_is_planned_like_an_eager_step_is_found(
    real: Callable[[Device], PlanningLibrary], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = PlanningLibrary.BatchDecodeWithPagedKVCacheWrapper

    def eager(self: PlanningLibrary, *arguments: object, **named: object) -> object:
        kept = {name: value for name, value in named.items() if name in ("use_tensor_cores", "backend")}
        return wrapper(self, *arguments, **kept)

    monkeypatch.setattr(PlanningLibrary, "BatchDecodeWithPagedKVCacheWrapper", eager)
    with pytest.raises(AssertionError):
        run_examples(Case(LayerSpec(8, 2, 128, 128, 0.1)), real(H100), monkeypatch)
