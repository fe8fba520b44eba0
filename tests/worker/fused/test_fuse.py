"""Fused layers against the same layers in plain torch, with FlashInfer's functions in plain torch too."""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bench.gpu import interpreter
from tests.models import FAMILIES
from tests.worker.model.fusing import TEXT, farthest, layers_of, own_model, refusals, stack_projections, trial_exactly
from transformers import PreTrainedModel

from fairlead_worker.model.fuse import KINDS, fuse_layers
from fairlead_worker.model.fused.library import Library
from fairlead_worker.model.layers.norm import RmsNorm
from fairlead_worker.model.trial import trial

LIMIT = 200
NAMES = [name for name in vars(Library) if not name.startswith("_")]


def stand_in(**other: Any) -> tuple[Library, dict[str, int]]:
    """The interpreter's functions, or those given, and how often each has been called."""
    calls = dict.fromkeys(NAMES, 0)

    def counted(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            calls[name] += 1
            return (other.get(name) or getattr(interpreter, name))(*arguments, **named)

        return call

    return cast(Library, SimpleNamespace(**{name: counted(name) for name in NAMES})), calls


def model_of(family: str, dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> PreTrainedModel:
    model: PreTrainedModel = own_model(family, dtype, **({} if family == "gpt2" else {"head_dim": 64}) | overrides)
    stack_projections(model)
    return model


DENSE = tuple(kind for kind in KINDS if kind not in ("experts", "sums"))
FUSED = {family: () if family == "gpt2" else DENSE for family in FAMILIES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_fused_and_says_the_same(family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    before, exact = trial(model, LIMIT, TEXT), trial_exactly(model, LIMIT)
    library, calls = stand_in()
    assert fuse_layers(model, library, LIMIT, TEXT) == FUSED[family]
    calls.update(dict.fromkeys(calls, 0))
    after = trial(model, LIMIT, TEXT)
    assert not refusals(after, before, exact)
    if family == "gpt2":
        assert not any(calls.values())
        return
    count = len(layers_of(model))
    gemma = family.startswith("gemma")
    assert calls["gemma_fused_add_rmsnorm" if gemma else "fused_add_rmsnorm"] == 2 * count, "both sums of every layer"
    assert calls["gelu_tanh_and_mul" if gemma else "silu_and_mul"] == count
    assert calls["apply_rope_with_cos_sin_cache_inplace"] == count
    # The first norm alone has no sum before it; Gemma's norms of answers, and those of queries and keys, stand by themselves.
    alone = 1 + count * {"qwen3": 2, "gemma2": 2, "gemma3": 4}.get(family, 0)
    assert calls["gemma_rmsnorm" if gemma else "rmsnorm"] == alone


@pytest.mark.parametrize(("family", "fused"), [("qwen2_moe", 2), ("glm4_moe", 2)])
def test_dense_and_shared_mlps_beside_experts_are_fused(family: str, fused: int) -> None:
    """Experts have their gate and up in one parameter, which is no module."""
    model = own_model(family, torch.bfloat16)
    stack_projections(model)
    assert any(isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter) for module in model.modules())
    before = trial(model, LIMIT, TEXT)
    exact = trial_exactly(model, LIMIT)
    library, calls = stand_in()
    assert fuse_layers(model, library, LIMIT, TEXT, ("activation",)) == ("activation",)
    calls.update(dict.fromkeys(calls, 0))
    assert not refusals(trial(model, LIMIT, TEXT), before, exact)
    assert calls["silu_and_mul"] == fused


@pytest.mark.parametrize("kinds", [(), ("norm",), ("activation", "rope")], ids=str)
def test_only_what_is_wanted_is_fused(kinds: tuple[str, ...]) -> None:
    model = model_of("llama")
    library, _ = stand_in()
    assert fuse_layers(model, library, LIMIT, TEXT, kinds) == kinds
    changed = {type(part).__name__ for part in model.modules() if "kernels" in vars(part)}
    assert changed == {"norm": {"RmsNorm"}, "activation": {"GatedMlp"}}.get(kinds[0] if kinds else "", set())
    assert all((rope.kernels is library) == ("rope" in kinds) for rope in model.model.ropes.values())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("norm", "fused_add_rmsnorm"),
        ("activation", "silu_and_mul"),
        ("rope", "apply_rope_with_cos_sin_cache_inplace"),
    ],
)
def test_what_answers_otherwise_is_taken_back_loudly(kind: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(*arguments: Any) -> Any:
        answer = getattr(interpreter, name)(*arguments)
        changed = answer if answer is not None else arguments[1]
        changed.mul_(1.5)
        return answer

    model = model_of("llama")
    before, exact = trial(model, LIMIT, TEXT), trial_exactly(model, LIMIT)
    library, calls = stand_in(**{name: wrong})
    with caplog.at_level(logging.WARNING):
        fused = fuse_layers(model, library, LIMIT, TEXT)
    assert fused == tuple(each for each in DENSE if each != kind)
    assert f"LlamaForCausalLM: {kind} stays unfused" in caplog.text
    calls.update(dict.fromkeys(calls, 0))
    assert not refusals(trial(model, LIMIT, TEXT), before, exact)
    assert not calls[name]


def test_a_kernel_that_cannot_be_built_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("Ninja build failed.\nnvcc: not found")

    model = model_of("llama")
    before = trial(model, LIMIT, TEXT)
    library, _ = stand_in(**dict.fromkeys(NAMES, broken))
    assert fuse_layers(model, library, LIMIT, TEXT) == ()
    assert "norm stays unfused: RuntimeError: nvcc: not found" in caplog.text
    assert farthest(trial(model, LIMIT, TEXT), before) == 0


def test_float32_and_other_heads_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    library, _ = stand_in()
    model = model_of("llama", torch.float32)
    assert fuse_layers(model, library, LIMIT, TEXT) == ()
    assert "kernels are for 16 bits, and it is in float32" in caplog.text
    model = model_of("qwen3", head_dim=32)
    assert fuse_layers(model, library, LIMIT, TEXT) == ("norm", "activation")
    assert "rope stays unfused: its heads are of 32" in caplog.text


def test_neighbours_are_rotated_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("llama")
    model.definition = replace(model.definition, interleaved=True)
    library, _ = stand_in()
    assert "rope" not in fuse_layers(model, library, LIMIT, TEXT)
    assert "it rotates neighbours" in caplog.text


def test_two_models_of_a_family_do_not_share_a_rope() -> None:
    fused, plain = model_of("llama"), model_of("llama")
    before = trial(plain, LIMIT, TEXT)
    library, calls = stand_in()
    assert "rope" in fuse_layers(fused, library, LIMIT, TEXT)
    calls.update(dict.fromkeys(calls, 0))
    assert farthest(trial(plain, LIMIT, TEXT), before) == 0
    assert not any(calls.values())


def test_hooks_of_projections_act_before_the_activation() -> None:
    """LoRA adapters hook gate and up, which stay one product; a hook that adds nothing changes no bit."""
    model = model_of("llama")
    library, calls = stand_in()
    fuse_layers(model, library, LIMIT, TEXT)
    before = trial(model, LIMIT, TEXT)
    added = torch.zeros((), dtype=torch.bfloat16)
    hook = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda _, inputs, outputs: outputs.add_(added))
    calls["silu_and_mul"] = 0
    assert farthest(trial(model, LIMIT, TEXT), before) == 0
    assert calls["silu_and_mul"] == len(model.model.layers)
    added.fill_(1)
    assert farthest(trial(model, LIMIT, TEXT), before) > 0
    hook.remove()


@pytest.mark.parametrize("plus_one", [False, True])
def test_a_norm_adds_what_it_reads_to_the_residual(plus_one: bool) -> None:
    """With a kernel and without, the residual becomes the sum."""
    library, calls = stand_in()
    weight, update, residual = torch.rand(8).bfloat16(), torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    norms = RmsNorm(8, 1e-6, plus_one), RmsNorm(8, 1e-6, plus_one)
    norms[1].kernels = library
    sums, answers = [], []
    for norm in norms:
        norm.weight = torch.nn.Parameter(weight, requires_grad=False)
        sums.append(residual.clone())
        answers.append(norm(update.clone(), sums[-1]))
    assert torch.equal(sums[0], residual + update) and torch.equal(sums[1], sums[0])
    torch.testing.assert_close(answers[1], answers[0])
    assert calls["gemma_fused_add_rmsnorm" if plus_one else "fused_add_rmsnorm"] == 1
    assert norms[1](update.float()).dtype == torch.float32, "the kernels are for 16 bits"
