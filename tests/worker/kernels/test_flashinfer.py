"""The FlashInfer backend on a CPU: its calls run on an interpreter of FlashInfer's documentation, against `reference`."""

import logging
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench.gpu import interpreter
from bench.gpu.batches import packed, steps, worst_error

from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.hopper import has_enough_tiles
from fairlead_worker.kernels.paging import plan_pages
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.kernels.registry import choose_backend, make_backend
from fairlead_worker.kernels.workspace import graph_workspace_bytes, workspace_bytes

CPU = torch.device("cpu")
PAGES = 3000
LLAMA = LayerSpec(4, 2, 64, 64, 0.125)
KINDS = {
    "multi-head": (LayerSpec(2, 2, 64, 64, 0.125),),
    "grouped, on tensor cores": (LayerSpec(8, 2, 64, 64, 0.2),),
    "one KV head of 128": (LayerSpec(4, 1, 128, 128, 0.1),),
    "window": (replace(LLAMA, window=9),),
    "window of a token": (replace(LLAMA, window=1),),
    "softcap": (replace(LLAMA, softcap=3.0),),
    "gemma: two kinds by turns": tuple(LayerSpec(2, 1, 256, 256, 0.0625, window=(20, None)[i % 2], softcap=5.0) for i in range(3)),
    "latents": (LayerSpec(16, 1, 576, 512, 0.05, value_in_key=True),) * 2,
    "latents of 128 heads beside plain ones": (LLAMA, LayerSpec(128, 1, 576, 512, 0.05, value_in_key=True)),
    "one kind is not FlashInfer's": (LLAMA, LayerSpec(2, 1, 80, 80, 0.1), LayerSpec(2, 1, 64, 32, 0.1), replace(LLAMA, window=30)),
}
ERROR = {torch.bfloat16: 0.012, torch.float16: 0.002}
"""Against float32 from the same 16-bit inputs: the output's own rounding and that of a query's weights."""


def backends(layers: tuple[LayerSpec, ...], page_size: int, dtype: torch.dtype) -> tuple[FlashInferBackend, ReferenceBackend]:
    spec = KVSpec(layers, page_size, dtype, CPU)
    return FlashInferBackend(spec, PAGES, interpreter), ReferenceBackend(replace(spec, dtype=torch.float32), PAGES)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, torch.bfloat16), (16, torch.float16), (5, torch.bfloat16), (64, torch.bfloat16)])
@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
def test_random_paged_batches_attend_as_the_reference_does(layers: tuple[LayerSpec, ...], page_size: int, dtype: torch.dtype) -> None:
    tested, oracle = backends(layers, page_size, dtype)
    rounds = steps(tested.spec, PAGES, random.Random(page_size), count=4, longest=40, requests=4)
    error, tokens = worst_error(tested, oracle, rounds, torch.Generator().manual_seed(page_size))
    assert tokens > 20
    assert error < ERROR[dtype]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("layers", KINDS.values(), ids=KINDS)
def test_rows_read_what_other_rows_of_their_step_store(layers: tuple[LayerSpec, ...], batch_invariant: bool) -> None:
    tested, oracle = backends(layers, 4, torch.bfloat16)
    tested.batch_invariant = batch_invariant
    leader = [9, 2, 7, 40, 11]
    step = packed([(8, 5), (0, 19), (16, 1), (12, 3)], [[*leader[:2], 3, 5], leader, [*leader[:4], 50], [*leader[:3], 60]], 4, CPU)
    assert worst_error(tested, oracle, [step], torch.Generator().manual_seed(3))[0] < ERROR[torch.bfloat16]


def test_decodes_and_chunks_of_a_step_have_a_plan_each() -> None:
    """Decodes come first in a step; a chunk of one token at its end stays with the chunks."""
    planned: list[tuple[str, int]] = []

    def counting(name: str, kind: type) -> type:
        def plan(self: object, *arguments: object, **named: object) -> None:
            planned.append((name, len(arguments[-5])))  # type: ignore[arg-type]  # the lengths of the last pages
            kind.plan(self, *arguments, **named)

        return type(name, (kind,), {"plan": plan})

    library = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=counting("prefill", interpreter.BatchPrefillWithPagedKVCacheWrapper),
        BatchDecodeWithPagedKVCacheWrapper=counting("decode", interpreter.BatchDecodeWithPagedKVCacheWrapper),
        append_paged_kv_cache=interpreter.append_paged_kv_cache,
    )
    backend = FlashInferBackend(KVSpec((LLAMA,), 4, torch.bfloat16, CPU), 20, library)  # type: ignore[arg-type]  # its three functions
    rows = {"decode": [(5, 1), (9, 1)], "chunk": [(0, 6), (4, 1)]}
    tables = {"decode": [[1, 2], [3, 4, 5]], "chunk": [[6, 7], [8, 9]]}
    for kinds, expected in (
        (("decode", "chunk"), [("decode", 2), ("prefill", 2)]),
        (("decode",), [("decode", 2)]),
        (("chunk",), [("prefill", 2)]),
    ):
        planned.clear()
        step = packed([row for kind in kinds for row in rows[kind]], [table for kind in kinds for table in tables[kind]], 4, CPU)
        oracle = ReferenceBackend(replace(backend.spec, dtype=torch.float32), 20)
        for part, other in zip((*backend.keys, *backend.values), (*oracle.keys, *oracle.values), strict=True):
            other[:20].copy_(part[:20])
        assert worst_error(backend, oracle, [step], torch.Generator().manual_seed(2))[0] < ERROR[torch.bfloat16]
        assert planned == expected


def test_a_step_of_more_latents_than_a_plan_takes_is_the_references() -> None:
    kind = LayerSpec(128, 1, 576, 512, 0.05, value_in_key=True)
    backend = FlashInferBackend(KVSpec((kind,), 64, torch.bfloat16, CPU), 200, interpreter)
    for tokens, planned in ((8000, 1), (8001, 0)):
        _, parts = backend.plan_parts(packed([(0, tokens)], [list(range(126))], 64, CPU))
        assert len(parts[0].wrappers) == planned


def test_latents_that_its_kernels_do_not_compute_are_left_out() -> None:
    latents = LayerSpec(16, 1, 576, 512, 0.05, value_in_key=True)
    for kind, scales, reason in (
        (replace(latents, heads=20), None, "20 heads"),
        (replace(latents, key_dim=320, value_dim=256), None, "latents of 256 with 64"),
        (latents, (1.0,), "float8"),
    ):
        spec = KVSpec((kind,), 16, torch.bfloat16, CPU, scales)
        assert not FlashInferBackend(spec, 8, interpreter).kinds and reason in choose_backend(replace(spec, device=torch.device("cuda")))[1]


def test_fa3_serves_steps_with_a_full_tile_for_every_processor() -> None:
    heads_of_128, heads_of_64 = LayerSpec(32, 8, 128, 128, 0.1), LayerSpec(32, 8, 64, 64, 0.1)
    assert has_enough_tiles(heads_of_128, [640], 132) and not has_enough_tiles(heads_of_128, [639], 132)
    assert has_enough_tiles(heads_of_64, [960], 132) and not has_enough_tiles(heads_of_64, [959], 132)
    assert not has_enough_tiles(heads_of_128, [127] * 100, 132), "short rows would leave the most of each tile empty"


def test_a_plan_for_each_kind_of_layer_and_a_warning_for_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        gemma, _ = backends(KINDS["gemma: two kinds by turns"], 16, torch.bfloat16)
        assert [kind.window for kind in gemma.kinds] == [20, None] and not caplog.text
        mixed, _ = backends((*KINDS["one kind is not FlashInfer's"], LayerSpec(2, 1, 80, 80, 0.1)), 16, torch.bfloat16)
    assert [kind.window for kind in mixed.kinds] == [None, 30]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, "once for each kind, not for each layer"
    assert "heads of 80" in said[0] and "`reference` attention" in said[0] and "2 of the layers" in said[0]
    assert "keys of 64 with values of 32" in said[1]


def test_float32_is_the_references() -> None:
    tested, oracle = backends((LLAMA,), 16, torch.float32)
    assert not tested.kinds
    rounds = steps(tested.spec, PAGES, random.Random(3), count=3, longest=40)
    assert worst_error(tested, oracle, rounds, torch.Generator().manual_seed(3))[0] == 0


def test_strided_views_and_float32_queries_are_taken() -> None:
    """Projections are stacked, heads come transposed, and some families turn queries in float32."""
    torch.manual_seed(0)
    stacked = torch.randn(9, (4 + 2 + 2) * 64).bfloat16()
    query, key, value = (part.unflatten(1, (-1, 64)) for part in stacked.split([256, 128, 128], 1))
    layouts = (
        (query, key, value),
        tuple(part.transpose(0, 1).contiguous().transpose(0, 1) for part in (query, key, value)),
        tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in (query, key, value)),
        (query.float(), key.float(), value),
    )
    step = packed([(0, 9)], [[4, 2]], 8, CPU)
    outputs = [backends((LLAMA,), 8, torch.bfloat16)[0].plan(step).attend(0, *layout) for layout in layouts]
    assert all(torch.equal(output.bfloat16(), outputs[0]) for output in outputs)
    assert outputs[3].dtype == torch.float32, "the model gets back what it gave"


def test_prepare_runs_every_kernel_and_leaves_out_what_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    """An image without a compiler, and a kind that was not built into it."""

    class NoCompiler(interpreter.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *arguments: object, window_left: int = -1, **named: object) -> None:
            if window_left >= 0:
                raise RuntimeError("ninja: build stopped\nCould not find nvcc")
            super().plan(*arguments, window_left=window_left, **named)

    class Library:
        BatchPrefillWithPagedKVCacheWrapper = interpreter.BatchPrefillWithPagedKVCacheWrapper
        BatchDecodeWithPagedKVCacheWrapper = NoCompiler
        append_paged_kv_cache = staticmethod(interpreter.append_paged_kv_cache)

    spec = KVSpec((LLAMA, replace(LLAMA, window=4)), 4, torch.bfloat16, CPU)
    backend = FlashInferBackend(spec, PAGES, Library())
    with caplog.at_level(logging.WARNING):
        backend.prepare()
    assert backend.kinds == [LLAMA] and "Could not find nvcc" in caplog.text
    oracle = ReferenceBackend(replace(spec, dtype=torch.float32), PAGES)
    rounds = steps(spec, PAGES, random.Random(1), count=4, longest=30)
    assert worst_error(backend, oracle, rounds, torch.Generator().manual_seed(1))[0] < ERROR[torch.bfloat16]


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_prepare_keeps_to_the_one_page_of_a_profile(page_size: int) -> None:
    """A GPU reports no error for a write beyond the storage."""
    backend = FlashInferBackend(KVSpec((LLAMA,), page_size, torch.bfloat16, CPU), 1, interpreter)
    backend.prepare()
    assert backend.kinds == [LLAMA]


def test_of_a_compilers_output_the_error_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(interpreter.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *arguments: object, **named: object) -> None:
            raise RuntimeError(
                "Ninja build failed. Ninja output:\n[1/9] nvcc\na.cu(7): fatal error: b.cuh: No such file\n1 error\nninja: stopped"
            )

    class Library:
        BatchPrefillWithPagedKVCacheWrapper = interpreter.BatchPrefillWithPagedKVCacheWrapper
        BatchDecodeWithPagedKVCacheWrapper = Broken
        append_paged_kv_cache = staticmethod(interpreter.append_paged_kv_cache)

    FlashInferBackend(KVSpec((LLAMA,), 4, torch.bfloat16, CPU), PAGES, Library()).prepare()
    assert "b.cuh: No such file" in caplog.text


def test_pages_are_the_references() -> None:
    """The host tier's copies, and a page that another backend wrote."""
    tested, _ = backends((LLAMA,), 4, torch.bfloat16)
    plain = ReferenceBackend(tested.spec, PAGES)
    content = torch.randn(2, tested.spec.page_bytes // 2).bfloat16()
    for backend in (tested, plain):
        backend.write_pages(torch.tensor([5, 1]), content)
    assert torch.equal(tested.read_pages(torch.arange(6)), plain.read_pages(torch.arange(6)))


def test_workspace_holds_the_partial_results_of_many_heads_on_one() -> None:
    assert workspace_bytes([LLAMA], 132) == 128 << 20
    falcon = LayerSpec(71, 1, 64, 64, 0.125)
    assert workspace_bytes([LLAMA, falcon], 132) == 2 * 132 * 128 * 65 * 4 * 71


def test_large_graphs_have_room_for_the_partial_results_of_all_rows() -> None:
    llama = LayerSpec(32, 8, 128, 128, 0.1)
    assert graph_workspace_bytes([llama], 256, 132) == 32 * (64 + 255) * 4 * 129 * 4 + 32 < 128 << 20
    spec = KVSpec((llama,), 16, torch.bfloat16, CPU)
    backend = FlashInferBackend(spec, 2, interpreter)
    for rows, size in ((256, 128 << 20), (2048, graph_workspace_bytes([llama], 2048, 1)), (8, graph_workspace_bytes([llama], 2048, 1))):
        step = packed([(0, 1)] * rows, [[0]] * rows, 16, CPU)
        backend.graph_wrappers(plan_pages(step, 16))
        assert len(backend._workspace) == size
    rows = plan_pages(packed([(0, 1)] * 4096, [[0]] * 4096, 16, CPU), 16)
    plain = FlashInferBackend(KVSpec((LayerSpec(8, 8, 64, 64, 0.1),), 16, torch.bfloat16, CPU), 2, interpreter)
    plain.graph_wrappers(rows)
    assert len(plain._workspace) == 128 << 20, "no tensor cores: keys are not split in large batches"
    assert size > 128 << 20


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_worker.kernels.flashinfer.library", lambda: None)
    with pytest.raises(ValueError, match=r"install fairlead\[gpu\]"):
        make_backend("flashinfer", KVSpec((LLAMA,), 16, torch.bfloat16, CPU), 4)
