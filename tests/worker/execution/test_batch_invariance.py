"""`--deterministic` on a CPU: the check itself, layers with fixed rows, and FlashInfer's padded plans on the interpreter."""

import random
from pathlib import Path

import pytest
import torch
from bench.gpu import interpreter
from bench.gpu.batches import steps, worst_error
from tests.models import build_model, save_model

from fairlead_worker.execution import batch_invariance
from fairlead_worker.execution.batch_invariance import NotInvariant, check_invariance, variable_window
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.kernels.base import KVSpec, LayerSpec
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.model.fixed_rows import FixedRows, fix_rows
from fairlead_worker.model.loader import load_model


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("gemma3", "bfloat16"), ("gpt2", "float32"), ("gpt_oss", "float32"), ("deepseek_v3", "bfloat16")],
)
def test_a_cpu_keeps_it(family: str, dtype: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype)
    fix_rows(loaded.model)
    check_invariance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=16, deterministic=True).build())


@pytest.mark.parametrize(("deterministic", "tolerance"), [(True, 0.0), (False, 1e-5)])
def test_torchs_attention_keeps_logits_within_rounding_and_exact_where_asked(
    deterministic: bool, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What level `none` promises: the same tokens but for ties. The tolerance is of the largest logit, in float32."""
    worst: list[float] = []

    def look(alone: torch.Tensor, together: torch.Tensor, where: str) -> None:
        worst.append(((alone - together).abs().max() / together.abs().max()).item())

    monkeypatch.setattr(batch_invariance, "_compare", look)
    save_model("gemma2", tmp_path)  # windows and soft caps
    loaded = load_model(str(tmp_path), dtype="float32")
    check_invariance(
        RunnerBuilder(loaded=loaded, page_size=16, kv_pages=16, backend="cpu", native_decoder=False, deterministic=deterministic).build()
    )
    assert len(worst) > 60 and max(worst) <= tolerance


def test_a_model_whose_rows_know_of_their_company_is_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    runner = RunnerBuilder(loaded=load_model(str(tmp_path), dtype="float32"), page_size=16, kv_pages=16, native_decoder=False).build()
    head = runner.loaded.model.lm_head
    plain = head.forward
    head.forward = lambda inputs: plain(inputs) * (1 + 1e-6 * inputs.shape[-2])
    with pytest.raises(NotInvariant, match=r"alone and in one chunk, token 0 of .* has other logits than in a batch"):
        check_invariance(runner)
    with pytest.raises(NotInvariant, match="set --kv-pages to at least"):
        check_invariance(RunnerBuilder(loaded=load_model(str(tmp_path), dtype="float32"), page_size=16, kv_pages=3).build())


def test_windows_that_a_request_can_exceed_are_refused_on_flashinfer(tmp_path: Path) -> None:
    """FlashInfer's tiles of keys start at the window of a chunk's first query, so sums beyond the window depend on the chunk."""
    save_model("mistral", tmp_path, head_dim=64, sliding_window=100)
    loaded = load_model(str(tmp_path), dtype="bfloat16", max_model_len=101)
    backend = FlashInferBackend(KVSpec(loaded.layers, 16, loaded.dtype, loaded.device), 16, interpreter)
    backend.batch_invariant = True
    with pytest.raises(NotInvariant, match=r"set --max-model-len to at most 100 \(it is 101\)"):
        check_invariance(ModelRunner(loaded, backend))
    loaded = load_model(str(tmp_path), dtype="bfloat16", max_model_len=100)
    assert variable_window(ModelRunner(loaded, backend)) is None
    assert variable_window(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=16).build()) is None


def test_layers_multiply_the_same_number_of_rows() -> None:
    model = build_model("llama")
    layer = model.lm_head
    seen: list[tuple[int, ...]] = []
    plain = layer.forward
    layer.forward = lambda inputs: seen.append(tuple(inputs.shape)) or plain(inputs)
    assert fix_rows(model) == 2 * 7 + 1 and isinstance(layer.forward, FixedRows)
    with torch.inference_mode():
        for tokens in (0, 1, 16, 40):
            inputs = torch.randn(1, tokens, 64)
            answer = layer(inputs)
            assert answer.shape == (1, tokens, 512)
            torch.testing.assert_close(answer, plain(inputs))
    assert set(seen) == {(16, 64)} and len(seen) == 1 + 1 + 1 + 3


@pytest.mark.parametrize("page_size", [1, 16])
def test_whole_tiles_attend_as_the_reference_does(page_size: int) -> None:
    layers = (LayerSpec(8, 2, 64, 64, 0.125), LayerSpec(4, 4, 64, 64, 0.125, window=20))
    spec = KVSpec(layers, page_size, torch.bfloat16, torch.device("cpu"))
    pages = 400 // page_size + 20
    tested = FlashInferBackend(spec, pages, interpreter)
    tested.batch_invariant = True
    tested.prepare()
    oracle = ReferenceBackend(KVSpec(layers, page_size, torch.float32, spec.device), pages)
    rounds = steps(spec, pages, random.Random(page_size), count=3, longest=40, requests=3)
    error, tokens = worst_error(tested, oracle, rounds, torch.Generator().manual_seed(page_size))
    assert tokens > 10 and error < 0.02


def test_every_row_has_a_whole_tile_and_no_keys_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.gpu.batches import packed

    plans: list[tuple[list[int], bool]] = []
    plan = interpreter.BatchPrefillWithPagedKVCacheWrapper.plan

    def recorded(self: object, *arguments: object, **named: object) -> None:
        plans.append((arguments[0].diff().tolist(), named["disable_split_kv"]))  # type: ignore[attr-defined,arg-type]  # a tensor, a bool
        plan(self, *arguments, **named)  # type: ignore[arg-type]  # as they came

    monkeypatch.setattr(interpreter.BatchPrefillWithPagedKVCacheWrapper, "plan", recorded)
    spec = KVSpec((LayerSpec(8, 2, 64, 64, 0.125),), 4, torch.bfloat16, torch.device("cpu"))
    backend = FlashInferBackend(spec, 32, interpreter)
    backend.batch_invariant = True
    backend.plan(packed([(5, 1), (0, 20)], [[1, 2], [3, 4, 5, 6, 7]], 4, spec.device))
    backend.plan(packed([(5, 1), (4, 1)], [[1, 2], [3, 4]], 4, spec.device))
    assert plans == [([17, 20], True), ([17, 17], True)], "17 queries of 4 heads on a KV head are more than 64"
