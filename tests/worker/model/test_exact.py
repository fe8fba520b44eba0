"""A model in float32, from weights of any form, against the same model loaded in float32."""

from pathlib import Path

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.model.fusing import TEXT, layers_of, own_model, stack_projections

from fairlead_worker.model.acceptance import distances, find_refusal
from fairlead_worker.model.exact import widened
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.packed import pack_linears
from fairlead_worker.model.trial_text import LENGTHS, STEPS, Reference, TrialText, places, run_whole
from fairlead_worker.native.library import native
from fairlead_worker.weights.tokenizer import load_tokenizer

ROUTERS = ("llama4 (text)", "phimoe")
"""Families whose router is a linear layer with a forward of its own."""


@pytest.mark.parametrize("family", [*FAMILIES, *ROUTERS])
def test_a_bfloat16_model_computes_as_in_float32(family: str) -> None:
    model = own_model(family, torch.bfloat16)
    layers, before = layers_of(model), {name: value.clone() for name, value in model.state_dict().items()}
    with widened(model):
        got = run_whole(model, layers, TEXT, torch.float32)
    assert got.dtype == torch.float32
    assert all(torch.equal(value, before[name]) and value.dtype == before[name].dtype for name, value in model.state_dict().items())
    assert run_whole(model, layers, TEXT, torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(got, run_whole(model.float(), layers, TEXT, torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(native() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_packed_weights_are_read_as_what_they_stand_for(quantization: str) -> None:
    model = own_model("qwen3", torch.bfloat16)
    layers = layers_of(model)
    reference = Reference.compute(model, layers, TEXT)
    stack_projections(model)
    pack_linears(model, quantization)
    again = Reference.compute(model, layers, TEXT)
    if quantization == "none":
        assert torch.equal(again.likely, reference.likely) and torch.allclose(again.logprobs, reference.logprobs, atol=1e-4)
        return
    assert not torch.allclose(again.logprobs, reference.logprobs, atol=1e-4), "weights are rounded"
    said = run_whole(model, layers, TEXT, torch.bfloat16)
    assert distances(again.take(said), again.logprobs).mean() < distances(reference.take(said), reference.logprobs).mean()


def test_an_error_inside_leaves_the_model_as_it_was() -> None:
    model = own_model("llama", torch.bfloat16)
    layers = layers_of(model)
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("planted")))
    with pytest.raises(KeyError), widened(model):
        run_whole(model, layers, TEXT, torch.float32)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert not any("forward" in vars(part) for part in model.modules())


def test_a_model_that_does_not_run_in_float32_keeps_its_own_computation(caplog: pytest.LogCaptureFixture) -> None:
    model = own_model("llama", torch.bfloat16)
    layers = layers_of(model)

    def only_bfloat16(_: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].dtype != torch.bfloat16:
            raise TypeError("its kernel is for 16 bits")

    model.model.layers[0].mlp.register_forward_pre_hook(only_bfloat16)
    reference = Reference.compute(model, layers, TEXT)
    assert "does not run in float32, so other computations are not taken for it: its kernel is for 16 bits" in caplog.text
    logits = run_whole(model, layers, TEXT, torch.bfloat16)
    assert not find_refusal(reference.take(logits), reference.take(logits), reference.logprobs)
    rounded_otherwise = logits + 0.01 * logits.std() * torch.randn(logits.shape)
    assert find_refusal(reference.take(rounded_otherwise), reference.take(logits), reference.logprobs)


def test_the_steps_of_the_trial_have_each_token_once() -> None:
    found = torch.cat([places(rows) for rows in STEPS])
    assert sorted(found.tolist()) == list(range(sum(LENGTHS)))


def test_texts_are_tokenized_by_the_models_tokenizer(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert all(map(torch.equal, TrialText.from_folder(tmp_path, 512).tokens, TrialText.random(512).tokens)), "it has none"
    from fairlead.random_model.tokenizer import save_tokenizer

    save_tokenizer(tmp_path, vocab=512, max_positions=512)
    text = load_model(str(tmp_path)).reference.text
    assert [len(tokens) for tokens in text.tokens] == list(LENGTHS)
    assert not torch.equal(text.tokens[0], TrialText.random(512).tokens[0])
    (tmp_path / "tokenizer.json").write_text("{")
    load_tokenizer.cache_clear()
    assert all(map(torch.equal, TrialText.from_folder(tmp_path, 512).tokens, TrialText.random(512).tokens))
