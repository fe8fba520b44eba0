"""The native decoder against the model's own modules: which models it supports, and which it rejects."""

import copy
import logging
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.real_models import GEMMA3, SMOLLM2, real_folder
from tests.worker.execution.planner import make_request

from fairlead.packaged_model import PackagedModel
from fairlead_worker.execution import forward as forward_module
from fairlead_worker.execution import native_forward
from fairlead_worker.execution.forward import ModuleForward, choose_forward
from fairlead_worker.execution.native_forward import NativeForward
from fairlead_worker.execution.pack import pack
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.ipc.messages import Sampling
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.kernels.native import NativeBackend
from fairlead_worker.kernels.registry import make_backend
from fairlead_worker.model.acceptance import distances
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.model.structure import Decoder, recognise
from fairlead_worker.model.trial_text import STEPS, Reference, trial_pages
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear
from fairlead_worker.scheduler.plan import Row, StepPlan

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
KNOWN = [family for family in FAMILIES if family != "gpt2"]
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
    """Return the distances to float32 of the native decoder and of the modules, [positions] each."""
    one, other, reference = backend(loaded), backend(loaded), loaded.reference
    forward, modules = choose_forward(loaded, one), ModuleForward(loaded.model)
    assert isinstance(forward, NativeForward)
    whole = reference.text.whole(16, loaded.device)
    return tuple(  # type: ignore[return-value]
        distances(reference.take(each(whole, kv.plan(whole))), reference.logprobs) for each, kv in ((forward, one), (modules, other))
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KNOWN)
def test_every_known_family_runs_natively(family: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, family, dtype)
    with caplog.at_level(logging.INFO):
        native, modules = off(loaded)
    assert native.mean() <= modules.mean() + 1e-5, "it rounds less often"
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
    native, modules = off(loaded)
    assert native.mean() <= modules.mean() + 1e-5


@pytest.mark.parametrize("model", [SMOLLM2, GEMMA3], ids=lambda model: model.name)
def test_trained_models_run_natively_and_nearer_to_float32_than_their_modules(model: PackagedModel) -> None:
    native, modules = off(load_model(str(real_folder(model))))
    assert native.mean() < 0.6 * modules.mean(), "0.35 on both: the modules round after every operation"


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_another_rope_is_told_whatever_the_weights(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3", tmp_path)
    loaded = load_model(str(tmp_path), dtype="bfloat16", quantization=quantization)
    known = forward_module.recognise

    def turned_otherwise(*given: Any) -> Decoder:
        decoder = known(*given)
        ropes = tuple(lambda count, rope=rope: tuple(part.flip(1) for part in rope(count)) for rope in decoder.ropes)
        return replace(decoder, ropes=ropes)

    monkeypatch.setattr(forward_module, "recognise", turned_otherwise)
    assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)


@pytest.mark.parametrize(("family", "overrides"), SHAPES.values(), ids=SHAPES)
def test_odd_shapes(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    native, modules = off(load(tmp_path, family, **overrides))
    assert max(native.max(), modules.max()) < 1e-5


def test_another_family_runs_by_its_modules_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, "gpt2")
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)
    assert "GPT2LMHeadModel runs module by module, not natively: GPT2Model has no embed_tokens" in caplog.text


def test_an_mlp_that_is_no_whole_number_of_panels_runs_by_its_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, intermediate_size=150)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)
    assert "an MLP of 150 inner values, not a multiple of 32" in caplog.text


def test_it_can_be_turned_off_and_needs_its_backend(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4).build().forward, NativeForward)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4, native_decoder=False).build().forward, ModuleForward)
    assert isinstance(RunnerBuilder(loaded=loaded, page_size=16, kv_pages=4, backend="cpu").build().forward, ModuleForward)


class Scaled(torch.nn.Module):
    """A part that computes more than its weights show."""

    def __init__(self, inner: torch.nn.Module, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = inner, factor

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self.inner(*args, **kwargs)
        return tuple(part * self.factor for part in answer) if isinstance(answer, tuple) else answer * self.factor


def test_a_difference_that_no_part_shows_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layer's forward scales the output of attention, as Granite's does: all its parts look as expected."""
    loaded = load(tmp_path)
    attention = loaded.model.model.layers[1].self_attn
    plain = attention.forward
    attention.forward = lambda *args, **kwargs: (plain(*args, **kwargs)[0] * 0.9, None)
    loaded = replace(loaded, reference=Reference.compute(loaded.model, loaded.layers, loaded.reference.text))
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)
    assert "runs module by module, not natively: it is on average" in caplog.text


@pytest.mark.parametrize("part", ["norm", "activation", "parameter", "head norm"])
def test_an_unknown_part_is_refused(part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, "qwen3")
    layer = loaded.model.model.layers[1]
    if part == "norm":
        layer.input_layernorm = Scaled(layer.input_layernorm, 1.1)
    elif part == "activation":
        layer.mlp.act_fn = torch.nn.ReLU()
    elif part == "parameter":
        layer.mlp.gate_norm = torch.nn.LayerNorm(4)
    else:
        layer.self_attn.q_norm = copy.deepcopy(layer.input_layernorm)
    reason = {"norm": "Scaled", "activation": "ReLU", "parameter": "gate_norm", "head norm": "not over a head's 32"}[part]
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)
    assert reason in caplog.text


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
        return "norms over [32, 64] dimensions"
    layer.mlp.down_proj = NativeLinear(torch.zeros(64, 40), None)
    return "gate and up is NativeLinear"


@pytest.mark.parametrize("part", ["head dtype", "embedding dtype", "norm", "down"])
def test_parts_that_do_not_fit_are_refused_before_the_library_reads_beyond_them(
    part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path)
    words = shrink(loaded.model, part)
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_forward(loaded, backend(loaded)), ModuleForward)
    assert words in caplog.text


def test_tables_that_could_not_be_made_are_tried_again(tmp_path: Path) -> None:
    """Without memory for longer tables the old ones stay, and no later step reads beyond them."""
    loaded = load(tmp_path)
    one = backend(loaded, pages=100)
    decoder = recognise(loaded.model, loaded.layers)
    memory = [False]

    def scarce(positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        if positions > 1024 and not memory[0]:
            raise MemoryError
        return decoder.ropes[0](positions)

    forward = NativeForward(replace(decoder, ropes=(scarce,)), one, 4096)
    request = make_request("long", [7] * 1500, Sampling(max_tokens=1))
    step = pack(StepPlan([Row(request, 0, 1500, array("i", range(100)), samples=True)]), 16, loaded.device)
    for _ in range(2):
        with pytest.raises(MemoryError):
            forward(step, one.plan(step))
    memory[0] = True
    assert forward(step, one.plan(step)).isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
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
        ("llama", {"attention_bias": True}, "none", True),
        ("llama", {"attention_bias": True}, "int8", True),
        pytest.param("llama", {"head_dim": 20}, "none", False, id="queries that fill no panel"),
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
