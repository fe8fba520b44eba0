"""The native decoder against the layers of the same definition: which models it computes, and which it rejects."""

import logging
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import save_model
from tests.real_models import GEMMA3, SMOLLM2, real_folder
from tests.worker.execution.planner import make_request

from fairlead.packaged_model import PackagedModel
from fairlead_worker.execution import native_forward
from fairlead_worker.execution.forward import LayerForward, ModuleForward, choose_forward, plain_forward
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.model.acceptance import distances
from fairlead_worker.model.catalog import SERVED
from fairlead_worker.model.layers.rotary import Rope
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.model.trial_text import STEPS, Reference, trial_pages
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear
from fairlead_worker.scheduler.plan import Row, StepPlan

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
KNOWN = [name for name, family in SERVED.items() if family.path == "native"]
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "odd vocabulary": ("llama", {"vocab_size": 517}),
    "odd widths": ("llama", {"hidden_size": 72, "intermediate_size": 160, "head_dim": 24}),
    "attention bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one head for all": ("mistral", {"num_key_value_heads": 1}),
    "scaled rope": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "partial rope": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
}


def load(folder: Path, family: str = "llama", dtype: str = "float32", **overrides: Any) -> LoadedModel:
    save_model(family, folder, **overrides)
    return load_model(str(folder), dtype=dtype)


def backend(loaded: LoadedModel, page_size: int = 16, pages: int = 0) -> NativeBackend:
    made = make_backend("native", KVSpec(loaded.layers, page_size, loaded.dtype, loaded.device), pages or trial_pages(page_size))
    assert isinstance(made, NativeBackend)
    return made


def off(loaded: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distances to float32 of the native decoder and of the layers in torch, [positions] each."""
    one, other, reference = backend(loaded), backend(loaded), loaded.reference
    forward, layers = choose_forward(loaded, one), plain_forward(loaded.model)
    assert isinstance(forward, NativeForward)
    whole = reference.text.whole(16, loaded.device)
    return tuple(  # type: ignore[return-value]
        distances(reference.take(each(whole, kv.plan(whole))), reference.logprobs) for each, kv in ((forward, one), (layers, other))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KNOWN)
def test_every_known_family_runs_natively(family: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, family, dtype)
    with caplog.at_level(logging.INFO):
        native, layers = off(loaded)
    assert native.mean() <= layers.mean() + 1e-5, "it rounds less often"
    assert f"runs natively: {len(loaded.layers)} layers in one call" in caplog.text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_run_natively_in_a_deep_model_too(quantization: str, dtype: str, tmp_path: Path) -> None:
    """Inputs close to a half are rounded either way, and each layer makes more of them."""
    save_model("qwen3", tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=12)
    off(load_model(str(tmp_path), dtype=dtype, quantization=quantization))


TRAINED_NORMS = {"input_layernorm": (-1.0, 60.0), "post_attention_layernorm": (-1.0, 740.0), "q_norm": (-0.5, 2.0), "norm": (0.0, 40.0)}
"""Ranges of norm weights as in Gemma 3 270M. Most of a norm's weights are small, and a few channels have the largest."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama", "qwen3"])
def test_norm_weights_of_trained_models_run_natively(family: str, dtype: str, tmp_path: Path) -> None:
    """Beside a weight of 740, a weight and the weight plus 1 look the same in bfloat16; the residual sum reaches 1e5."""
    model = save_model(family, tmp_path, num_hidden_layers=4)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-2]
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            low, high = TRAINED_NORMS.get(kind, (-0.5, 100.0))
            shape = torch.rand(parameter.shape, generator=generator)
            parameter.data = low + 2 * shape + (high - low) * shape**40
            parameter.data[0] = high
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype)
    native, layers = off(loaded)
    assert native.mean() <= layers.mean() + 1e-5


@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=lambda model: model.name)
def test_trained_models_run_natively_and_nearer_to_float32_than_their_modules(model: PackagedModel) -> None:
    native, layers = off(load_model(str(real_folder(model))))
    assert native.mean() < 0.6 * layers.mean(), "0.35 on both: the layers round after every operation"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_another_rope_is_told_whatever_the_weights(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3", tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16", quantization=quantization)
    reach = NativeForward._reach

    def turned_otherwise(self: NativeForward, positions: int) -> None:
        rotations = self._rotations
        self._rotations = [Rope(rope.frequencies.flip(0)) for rope in rotations]
        reach(self, positions)
        self._rotations = rotations

    monkeypatch.setattr(NativeForward, "_reach", turned_otherwise)
    assert isinstance(choose_forward(loaded, backend(loaded)), LayerForward)


@pytest.mark.parametrize(("family", "overrides"), SHAPES.values(), ids=SHAPES)
def test_odd_shapes(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    native, layers = off(load(tmp_path, family, **overrides))
    assert max(native.max(), layers.max()) < 1e-5


def test_an_mlp_that_is_no_whole_number_of_panels_runs_by_its_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, intermediate_size=150)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), LayerForward)
    assert "an MLP of 150 inner values, not a multiple of 32" in caplog.text


def test_it_can_be_turned_off_and_needs_its_backend(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4).build().forward, NativeForward)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4, native_decoder=False).build().forward, LayerForward)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4, backend="cpu").build().forward, LayerForward)


def test_a_difference_that_no_part_shows_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layer's forward scales the output of attention, which its definition does not say."""
    loaded = load(tmp_path)
    attention = loaded.model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args: plain(*args) * 0.9
    loaded = replace(loaded, reference=Reference.compute(loaded.model, loaded.layers, loaded.reference.text))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), LayerForward)
    assert "runs layer by layer, not natively: it is on average" in caplog.text


OTHERS = {
    "deepseek_v2": "it has latents",
    "bitnet": "it runs by transformers' own code",
    "mixtral": "it has MixtralSparseMoeBlock, not an MLP",
    "qwen3_5 (text)": "it has recurrent layers",
}


@pytest.mark.parametrize("family", OTHERS)
def test_what_the_library_does_not_compute_runs_layer_by_layer_and_says_why(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path, family)
    with caplog.at_level(logging.WARNING):
        forward = choose_forward(loaded, backend(loaded))
    assert isinstance(forward, ModuleForward if family == "bitnet" else LayerForward)
    assert f"runs layer by layer, not natively: {OTHERS[family]}" in caplog.text


def shrink(model: Any, part: str) -> str:
    """Give `model` one part of another size or dtype than its neighbours need; return the error text."""
    layer = model.model.layers[1]
    if part == "head dtype":
        model.lm_head = NativeLinear(torch.zeros(512, model.config.hidden_size, dtype=torch.bfloat16), None)
        return "head is NativeLinear"
    if part == "embedding dtype":
        model.model.embed_tokens.to(torch.bfloat16)
        return "an embedding of 64 dimensions in torch.bfloat16"
    if part == "norm":
        layer.input_layernorm.weight = torch.nn.Parameter(torch.ones(32))
        return "it has a norm over 32 dimensions, not over 64"
    layer.mlp.down_proj = NativeLinear(torch.zeros(64, 40), None)
    return "gate and up is NativeLinear"


@pytest.mark.parametrize("part", ["head dtype", "embedding dtype", "norm", "down"])
def test_parts_that_do_not_fit_are_refused_before_the_library_reads_beyond_them(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path)
    words = shrink(loaded.model, part)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), LayerForward)
    assert words in caplog.text


def test_tables_that_could_not_be_made_are_tried_again(tmp_path: Path) -> None:
    """Without memory for longer tables the old ones stay, and no later step reads beyond them."""
    loaded = load(tmp_path)
    one = backend(loaded, pages=100)
    rope = loaded.model.model.ropes[""]
    tables, memory = rope.tables, [False]

    def scarce(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(positions) > 1024 and not memory[0]:
            raise MemoryError
        return tables(positions)

    rope.tables = scarce
    forward = NativeForward(loaded.model, one, 4096)
    request = make_request("long", [7] * 1500, Sampling(max_tokens=1))
    step = pack(StepPlan([Row(request, 0, 1500, array("i", range(100)), samples=True)]), 16, loaded.device)
    for _ in range(2):
        with pytest.raises(MemoryError):
            forward(step, one.plan(step))
    memory[0] = True
    assert forward(step, one.plan(step)).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "cohere", "gpt_neox", "olmo2"])
def test_a_row_has_the_same_bits_in_any_company(family: str, dtype: str, tmp_path: Path) -> None:
    """Logits of a prompt and of a decode, alone and in a batch, with one thread and with two."""
    loaded = load(tmp_path, family, dtype)
    requests = [make_request(str(i), [(i * 37 + j * 11) % 500 for j in range(120)], Sampling(max_tokens=1)) for i in range(5)]
    pages = [array("i", range(i * 8, i * 8 + 8)) for i in range(5)]
    prompts = [Row(request, 0, 90 + i, table, samples=True) for i, (request, table) in enumerate(zip(requests, pages, strict=True))]
    decodes = [Row(row.request, row.count, 1, row.pages, samples=True) for row in prompts]
    before = torch.get_num_threads()
    try:
        results = []
        for threads, alone in ((1, True), (2, False)):
            torch.set_num_threads(threads)
            runner = ModelRunner(loaded, backend(loaded, pages=40))
            assert isinstance(runner.forward, NativeForward)
            for rows in (prompts, decodes):
                results.append(torch.cat([runner.logits(StepPlan([row])) for row in rows]) if alone else runner.logits(StepPlan(rows)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_logits_of_any_tokens_in_any_number(tmp_path: Path) -> None:
    """Speculation and prompt log-probabilities sample several tokens of a row; a chunk that is not the last samples none."""
    loaded = load(tmp_path)
    one = backend(loaded)
    forward = choose_forward(loaded, one)
    step = loaded.reference.text.step(STEPS[0], 16, loaded.device)
    everything = forward(step, one.plan(step))
    for chosen in ([], [0], [29], [3, 4, 5, 20], list(range(30))):
        some = replace(step, sampling=torch.tensor(chosen, dtype=torch.int64))
        assert torch.equal(forward(some, one.plan(some)), everything[chosen])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "overrides", "quantization", "alone"),
    [
        ("qwen3", {}, "none", True),
        ("gemma2", {}, "none", True),
        ("cohere", {}, "none", True),
        ("gpt_neox", {}, "none", True),
        ("olmo2", {}, "none", True),
        ("llama", {"attention_bias": True}, "none", True),
        ("llama", {"attention_bias": True}, "int8", True),
        pytest.param("llama", {"head_dim": 20}, "none", False, id="queries that fill no panel"),
        pytest.param("cohere", {"hidden_size": 80}, "none", False, id="queries that fill no panel, beside an MLP"),
    ],
)
def test_the_few_that_sample_go_alone_through_the_last_layers_attention(
    family: str, overrides: dict[str, Any], quantization: str, alone: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few sampling rows have the same bits as among all rows, beside chunks and decodes, after many keys and few; all KV is kept."""
    save_model(family, tmp_path, **overrides)
    loaded = load_model(str(tmp_path), dtype=dtype, quantization=quantization)
    requests = [make_request(str(i), [(i * 37 + j * 11) % 500 for j in range(900)], Sampling(max_tokens=1)) for i in range(4)]
    pages = [array("i", range(i * 57, i * 57 + 57)) for i in range(4)]

    def row(i: int, start: int, count: int, samples: bool = True) -> Row:
        return Row(requests[i], start, count, pages[i], samples)

    steps = [
        [row(0, 0, 700, False), row(1, 0, 40)],
        [row(0, 700, 60), row(1, 40, 1), row(2, 0, 33), row(3, 0, 90, False)],
        [row(0, 760, 1), row(1, 41, 1), row(2, 33, 1), row(3, 90, 64)],
    ]
    results = []
    for few in (native_forward.FEW, 10**9):
        monkeypatch.setattr(native_forward, "FEW", few)
        runner = ModelRunner(loaded, backend(loaded, pages=4 * 57))
        forward = runner.forward
        assert isinstance(forward, NativeForward)
        results.append([])
        for rows in steps:
            results[-1].append(runner.logits(StepPlan(rows)))
            assert bool(forward._pass.last) == (alone and few == 4)
    assert all(map(torch.equal, *results))


def test_long_texts_and_large_steps(tmp_path: Path) -> None:
    """Rope tables grow; more rows than an MLP takes at once."""
    loaded = load(tmp_path, "qwen3")
    request = make_request("long", [(j * 7) % 500 for j in range(2600)], Sampling(max_tokens=1))
    runners = [RunnerBuilder(loaded=loaded, page_size=16, kv_pages=200, native_decoder=on).build() for on in (True, False)]
    for start, count in ((0, 1300), (1300, 1299), (2599, 1)):
        got, want = (runner.logits(StepPlan([Row(request, start, count, array("i", range(200)), samples=True)])) for runner in runners)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
