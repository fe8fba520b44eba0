"""Stacked and packed projections against the layers that they replace."""

import logging
import weakref
from typing import Any

import pytest
import torch
from tests.models import FAMILIES
from tests.worker.model.fusing import own_model, stack_projections
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model import packed
from fairlead_worker.model.acceptance import close
from fairlead_worker.model.layers.stack import Projections, Stack
from fairlead_worker.model.packed import PackedLinear, can_pack, pack_linears
from fairlead_worker.model.trial import trial_logits
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import NativeLinear

STACKS = {"llama": 4, "qwen2": 4, "qwen3": 4, "mistral": 4, "gemma2": 8, "gemma3": 8, "gpt2": 0}
PACKED = [
    pytest.param(dtype, marks=pytest.mark.skipif(not can_pack(dtype), reason=f"oneDNN packs no {dtype} at this CPU level"), id=str(dtype))
    for dtype in (torch.float32, torch.bfloat16)
]
needs_native = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
PACKERS = [
    *(pytest.param(NativeLinear, dtype, marks=needs_native) for dtype in (torch.float32, torch.bfloat16)),
    *(pytest.param(PackedLinear, *given.values, marks=given.marks) for given in PACKED),
]


def modules(model: PreTrainedModel, kind: type[nn.Module]) -> int:
    return sum(isinstance(module, kind) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_fused_and_says_the_same(family: str, dtype: torch.dtype) -> None:
    model = own_model(family, dtype)
    before = trial_logits(model)
    assert stack_projections(model) == STACKS[family] == modules(model, Stack)
    assert close(trial_logits(model), before)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("kind", "dtype"), PACKERS)
def test_every_family_is_packed_and_says_the_same(
    family: str, dtype: torch.dtype, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is PackedLinear:
        monkeypatch.setattr(packed, "native", lambda: None)
    model = own_model(family, dtype)
    before = trial_logits(model)
    stack_projections(model)
    assert pack_linears(model) == modules(model, kind) == model.config.num_hidden_layers * 4 + 1
    assert modules(model, nn.Linear) == 0
    assert close(trial_logits(model), before)


@needs_native
@pytest.mark.parametrize(("quantization", "near"), [("int8", 0.04), ("int4", 0.4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rounded_and_says_nearly_the_same(family: str, quantization: str, near: float) -> None:
    model = own_model(family)
    before = trial_logits(model)
    stack_projections(model)
    assert pack_linears(model, quantization) == model.config.num_hidden_layers * 4 + 1
    head = model.get_output_embeddings()
    assert head.quantization == "int8"
    assert all(layer.quantization == quantization for layer in model.modules() if isinstance(layer, NativeLinear) and layer is not head)
    after = trial_logits(model)
    assert not close(after, before)
    assert float((after - before).norm() / before.norm()) < near  # weights are 1 and 10 % off, and several layers add up


@needs_native
def test_a_layer_that_answers_otherwise_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    forward = NativeLinear.forward
    monkeypatch.setattr(NativeLinear, "forward", lambda self, inputs: forward(self, inputs) + (self.out_features == 512))
    model = own_model("llama")
    before = trial_logits(model)
    with caplog.at_level(logging.WARNING):
        assert pack_linears(model) == model.config.num_hidden_layers * 7
    assert "LlamaForCausalLM.lm_head stays unpacked and slow: it is on average" in caplog.text
    assert type(model.lm_head) is nn.Linear
    monkeypatch.undo()
    assert close(trial_logits(model), before)


@needs_native
def test_a_layer_with_a_weight_that_is_no_number_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """All others are rounded all the same."""
    model = own_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[3, 5] = float("nan")
    with caplog.at_level(logging.WARNING):
        assert pack_linears(model, "int4") == model.config.num_hidden_layers * 7
    assert "CausalAttention.o_proj stays unpacked and slow: in int4 its outputs are not finite" in caplog.text
    assert type(model.model.layers[0].self_attn.o_proj) is nn.Linear


def test_plain_weights_are_given_back_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model("llama")
    plain = [weakref.ref(layer.weight) for layer in model.model.modules() if isinstance(layer, nn.Linear)]
    left: list[int] = []
    pack = packed._pack

    def counting(*given: Any) -> nn.Module | None:
        left.append(sum(weight() is not None for weight in plain))
        return pack(*given)

    monkeypatch.setattr(packed, "_pack", counting)
    pack_linears(model)
    assert all(found <= len(plain) - done + 1 for done, found in enumerate(left[: len(plain)]))
    assert not any(weight() is not None for weight in plain)


class Pair(Projections):
    """Two projections of an input of 8."""

    STACK, PARTS = "both_proj", ("one_proj", "other_proj")

    def __init__(self, bias: bool = True, stacked: bool = False) -> None:
        super().__init__()
        self.add_projections(8, [6, 3], bias, stacked)


@torch.inference_mode()
def test_a_stack_gives_what_its_parts_give_and_is_one_product() -> None:
    pair, inputs = Pair(), torch.randn(2, 8)
    want = pair.project(inputs)
    assert pair.whole is None and pair.stack() and not pair.stack(), "once"
    runs: list[int] = []
    pair.whole.linear.register_forward_hook(lambda *_: runs.append(1))
    assert all(map(close, pair.project(inputs), want)) and runs == [1]
    assert (pair.one_proj.in_features, pair.other_proj.out_features) == (8, 3), "adapters ask"
    whole = Pair(stacked=True)
    assert [part.shape[1] for part in whole.project(inputs)] == [6, 3] and not whole.stack()


@torch.inference_mode()
def test_a_hook_of_a_part_sees_its_inputs_and_changes_its_outputs_only() -> None:
    pair, inputs = Pair(), torch.randn(2, 8)
    pair.stack()
    want = pair.project(inputs)
    seen: list[bool] = []

    def add(_: object, given: tuple[torch.Tensor, ...], outputs: torch.Tensor) -> torch.Tensor:
        seen.append(given[0] is inputs)
        return outputs.add_(1)

    handle = pair.other_proj.register_forward_hook(add)
    one, other = pair.project(inputs)
    assert seen == [True] and torch.equal(one, want[0]) and torch.equal(other, want[1] + 1)
    handle.remove()
    assert torch.equal(pair.project(inputs)[1], want[1])


@pytest.mark.parametrize("change", ["dtype", "bias", "hook", "type"])
def test_parts_that_differ_are_not_stacked(change: str) -> None:
    pair: Any = Pair()
    if change == "dtype":
        pair.other_proj.to(torch.bfloat16)
    elif change == "bias":
        pair.other_proj.bias = None
    elif change == "hook":
        pair.one_proj.register_forward_pre_hook(lambda *_: None)
    else:
        pair.one_proj = nn.Identity()
    assert not pair.stack() and pair.whole is None


@pytest.mark.parametrize("dtype", PACKED)
@torch.inference_mode()
def test_a_packed_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    layer = PackedLinear(torch.randn(96, 64, dtype=dtype), torch.randn(96, dtype=dtype))
    inputs = torch.randn(70, 64, dtype=dtype)
    whole = layer(inputs)
    assert all(torch.equal(layer(inputs[:rows]), whole[:rows]) for rows in (1, 2, 7, 16, 33))
    long, inputs = PackedLinear(torch.randn(768, 2304, dtype=dtype), None), torch.randn(70, 2304, dtype=dtype)
    assert all(torch.equal(long(inputs[:rows]), long(inputs)[:rows]) for rows in (1, 2, 7, 16, 33))
    assert layer(inputs[None, :0]).shape == (1, 0, 96)
