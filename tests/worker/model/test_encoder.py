"""Encoders and their heads equal transformers' in float32: single texts and mixed batches, without padding."""

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.worker.model.encoders import ENCODERS, make_encoder
from torch.nn.functional import normalize
from transformers import AutoModel, AutoModelForSequenceClassification

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.encoder import is_encoder, load_encoder
from fairlead_worker.model.layers.texts import PackedTexts

LENGTHS = (3, 1, 7, 7, 7, 40, 64, 150, 150, 330)
"""Runs of equal lengths, and texts longer than a window of local attention and than one block of its queries."""
CPU = torch.device("cpu")


def texts(seed: int = 0) -> list["array[int]"]:
    draw = torch.Generator().manual_seed(seed)
    return [array("I", torch.randint(4, 500, (length,), generator=draw).tolist()) for length in LENGTHS]


@torch.inference_mode()
@pytest.mark.parametrize("name", ENCODERS)
def test_states_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, name)
    assert is_encoder(folder)
    loaded, reference = load_encoder("a", folder), AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    batch = texts()
    for part in (batch, *([text] for text in batch)):
        packed = PackedTexts.pack(part, [0] * len(part), CPU)
        states = loaded.model(packed)
        want = [reference.eval()(torch.tensor([list(text)])).last_hidden_state[0] for text in part]
        torch.testing.assert_close(states, torch.cat(want), rtol=0, atol=1e-5)
        for kind, of in (("cls", lambda each: each[0]), ("last", lambda each: each[-1]), ("mean", lambda each: each.mean(0))):
            torch.testing.assert_close(normalize(packed.pool(states, kind)), normalize(torch.stack([*map(of, want)])), rtol=0, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in ENCODERS), ("modernbert", {"classifier_pooling": "mean"})])
def test_heads_equal_transformers(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, name, labels=3, **settings)
    loaded, reference = load_encoder("a", folder), AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert loaded.classifier is not None and len(loaded.classifier.labels) == 3 and "use /classify" in loaded.pooling.refused
    batch, seconds = texts(1), [length // 2 if name == "bert" else 0 for length in LENGTHS]
    packed = PackedTexts.pack(batch, seconds, CPU)
    logits = loaded.model.classify(loaded.model(packed), packed)
    for text, second, got in zip(batch, seconds, logits, strict=True):
        types = {"token_type_ids": torch.tensor([[0] * second + [1] * (len(text) - second)])} if second else {}
        torch.testing.assert_close(got, reference.eval()(torch.tensor([list(text)]), **types).logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "labels", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({}, 2, "softmax"),
        ({"problem_type": "multi_label_classification"}, 2, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}, "problem_type": "regression"}, 1, "sigmoid"),
    ],
)
def test_scores_are_activated_as_the_config_says(settings: dict[str, Any], labels: int, activation: str, tmp_path: Path) -> None:
    classifier = load_encoder("a", make_encoder(tmp_path, "bert", labels, **settings)).classifier
    assert classifier is not None and classifier.activation == activation


@pytest.mark.parametrize(
    ("settings", "options", "says"),
    [
        ({"position_embedding_type": "relative_key"}, {}, "position_embedding_type 'relative_key'"),
        ({"hidden_act": "mish"}, {}, "hidden_act 'mish'"),
        ({}, {"max_model_len": 513}, "--max-model-len 513 is more than the model's 512"),
        ({"num_hidden_layers": 3}, {}, "missing weights: 16 tensors, first encoder.layer.2"),
    ],
)
def test_what_cannot_be_served_is_refused(settings: dict[str, Any], options: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "bert", after=settings)
    with pytest.raises(ModelLoadError, match=says):
        load_encoder("a", folder, **options)


def test_names_of_the_first_checkpoints_are_read_and_damaged_weights_refused(tmp_path: Path) -> None:
    file = make_encoder(tmp_path, "bert") / "model.safetensors"
    old = {
        f"bert.{name}".replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): each
        for name, each in load_file(file).items()
    }
    save_file(old, file)
    load_encoder("a", tmp_path)
    old["bert.embeddings.LayerNorm.gamma"][0] = float("nan")
    save_file(old, file)
    with pytest.raises(ModelLoadError, match="not finite"):
        load_encoder("a", tmp_path)


def test_the_length_is_that_of_sentence_transformers_files(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "xlm-roberta")
    assert load_encoder("a", folder).max_model_len == 512, "two positions are the padding's"
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert load_encoder("a", folder).max_model_len == 100
    assert load_encoder("a", folder, max_model_len=400).max_model_len == 400
