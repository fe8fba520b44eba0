"""Models whose KV are latents: the same tokens as `generate` in any batch, cache and form of the weights, in pages of the latents' size."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lora import save_adapter
from tests.models import build_model, save_model
from tests.worker.exactness.cases import NGRAM, Case, check_alone, check_cold_and_warm, check_preempted, make_case
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.kernels.test_attention import needs_library
from tests.worker.model.checkpoints import Form, blocks, save_quantized

from fairlead_worker.errors import AdapterError
from fairlead_worker.execution.batch_invariance import check_invariance
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.layers.latent import Absorbed
from fairlead_worker.model.loader import load_model

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) <= 777]
LATENT = 32 + 8
"""Numbers of a token in a layer: those of the latent, and of the rotated part of the key."""


@pytest.fixture(scope="module", params=["deepseek_v3", "youtu"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, 777)


def test_alone(case: Case) -> None:
    check_alone(case)


@pytest.mark.parametrize(
    ("chunk", "page_size", "backend"), [(16, 16, "auto"), (64, 4, "auto"), (512, 16, "cpu"), (64, 5, "reference"), (0, 64, "auto")], ids=str
)
def test_batched_cold_and_warm(case: Case, chunk: int, page_size: int, backend: str) -> None:
    check_cold_and_warm(case, chunk, page_size, backend)


@pytest.mark.parametrize("settings", [{}, NGRAM])
def test_preempted_and_evicted(case: Case, settings: dict[str, Any]) -> None:
    check_preempted(case, 200, **settings)


def test_a_draft_model(case: Case) -> None:
    """The model drafts for itself."""
    settings = NGRAM | {"speculative_method": "draft"}
    engine = Engine(case.loaded, chunk=64, pages=4096, page_size=4, settings=settings, draft=case.loaded)
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    drafts = engine.scheduler.load().drafts
    assert drafts is not None and drafts.accepted > drafts.tokens / 2 > 0


def test_prefixes_come_back_from_the_host(case: Case) -> None:
    chosen = [i for i, prompt in enumerate(case.prompts) if 15 <= len(prompt) <= 129]
    for backend in ("auto", "cpu", "reference"):
        engine = Engine(case.loaded, chunk=64, pages=50, page_size=4, host_slots=250, backend=backend)
        for _ in range(2):
            assert [engine.serve([case.prompts[i]])[0] for i in chosen] == [case.expected[i] for i in chosen]
        host = engine.scheduler.load().host
        assert host is not None and host.loaded and not host.dropped


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_pages_hold_latents_alone(case: Case, backend: str) -> None:
    held = Engine(case.loaded, chunk=0, pages=10, backend=backend).runner.backend
    assert held.spec.page_bytes == 2 * 16 * LATENT * 4
    assert sum(part.nbytes for part in held._stored) == 10 * held.spec.page_bytes  # type: ignore[attr-defined]
    page = held.read_pages(torch.tensor([3]))
    assert page.nbytes == held.spec.page_bytes


@needs_library
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    case = make_case("youtu", 777)
    check_invariance(Engine(case.loaded, chunk=64, deterministic=True).runner)


def test_float8_in_blocks_as_deepseek_publishes_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="the extra gpu is not installed")
    form = Form(blocks(8, 8, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": [8, 8]}, family="deepseek_v3")
    model = save_quantized(form, tmp_path)
    assert Engine(load_model(str(tmp_path), dtype="float32"), chunk=64).serve(PROMPTS) == generate(model, PROMPTS)


@needs_library
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_absorbed_projections_are_not_quantized(quantization: str, tmp_path: Path) -> None:
    model = save_model("youtu", tmp_path)
    loaded = load_model(str(tmp_path), quantization=quantization, dtype="bfloat16")
    absorbed = loaded.model.get_submodule("model.layers.1.self_attn.kv_b_proj")
    assert isinstance(absorbed, Absorbed)
    both = model.get_parameter("model.layers.1.self_attn.kv_b_proj.weight").view(4, 32, 32).bfloat16()
    latents = torch.randn(9, 4, 32).bfloat16()
    torch.testing.assert_close(absorbed.value(latents), torch.einsum("thr,hvr->thv", latents, both[:, 16:]), atol=0.05, rtol=0.02)
    engine, other = (Engine(loaded, chunk, pages=512) for chunk in (64, 0))
    assert engine.serve(PROMPTS) == [other.serve([prompt], root=i)[0] for i, prompt in enumerate(PROMPTS)]


def test_adapters_of_what_is_not_absorbed(tmp_path: Path) -> None:
    save_model("youtu", tmp_path / "base")
    targets = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]
    merged = save_adapter(build_model("youtu"), tmp_path / "a", 0, targets=targets)
    save_adapter(build_model("youtu"), tmp_path / "b", 1, targets=["kv_b_proj"])
    loaded = load_model(str(tmp_path / "base"))
    adapters = AdapterSet(loaded, 2, 64)
    adapters.load(1, "a", "file:///a", tmp_path / "a")
    prompts = PROMPTS[:9]
    assert Engine(loaded, chunk=48, adapters=adapters).serve(prompts, adapters=[1] * 9) == generate(merged, prompts)
    with pytest.raises(AdapterError, match="kv_b_proj is no linear layer of the model"):
        adapters.load(2, "b", "file:///b", tmp_path / "b")


def test_a_router_keeps_its_correction_in_float32_and_may_lack_it(tmp_path: Path) -> None:
    model = save_model("axk1", tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert load_model(str(tmp_path), dtype="bfloat16").model.get_buffer(name).dtype == torch.float32
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    assert Engine(load_model(str(tmp_path)), chunk=64).serve(PROMPTS[:6]) == generate(model, PROMPTS[:6])


def test_a_latent_that_the_kernels_do_not_take_is_expanded_by_transformers(tmp_path: Path) -> None:
    model = save_model("youtu", tmp_path, kv_lora_rank=30)
    engine = Engine(load_model(str(tmp_path)), chunk=64)
    assert engine.runner.path == "transformers"
    assert engine.serve(PROMPTS[:6]) == generate(model, PROMPTS[:6])
