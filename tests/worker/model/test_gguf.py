"""Models of GGUF files against the models that they were written from, and against transformers' own reading of the same file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_models import small_model, write_gguf
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from fairlead_worker.model import gguf as reading
from fairlead_worker.model.exact import widened
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.model.trial_text import TrialText, run_whole
from fairlead_worker.native.ggml import BLOCK_TYPES, GgmlLinear
from fairlead_worker.native.library import native
from fairlead_worker.weights.cache import ModelCache

CLOSE = 2e-5
"""Of the largest logit: sums of float32 in another order."""
needs_native = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")


def load(path: Path, tmp_path: Path, **settings: Any) -> LoadedModel:
    return load_model(path.as_uri(), cache=ModelCache(tmp_path / "cache"), **{"dtype": "float32", **settings})


def exact_logits(loaded: LoadedModel) -> torch.Tensor:
    """Return logits [P, vocabulary] of random tokens, computed in float32 from the numbers of the file."""
    with widened(loaded.model), torch.inference_mode():
        return run_whole(loaded.model, loaded.layers, tokens(loaded.vocabulary_size), torch.float32)


def tokens(vocabulary: int) -> TrialText:
    return TrialText.random(vocabulary)


def transformers_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(input_ids=text[None]).logits[0] for text in tokens(model.config.vocab_size).tokens])


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got - want).abs().max() <= CLOSE * want.abs().max()


@pytest.fixture(params=["in blocks", "widened"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Load the file as on a CPU with the native library, and as without it or on a GPU."""
    if request.param == "in blocks" and native() is None:
        pytest.skip("the native library is not built, or not for this CPU")
    if request.param == "widened":
        monkeypatch.setattr(reading, "native", lambda: None)
    yield request.param


GEMMA = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 8, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"num_hidden_layers": 6, "sliding_window_pattern": 6},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_the_model_that_it_was_written_from(family: str, way: str, tmp_path: Path) -> None:
    model = small_model(family.removeprefix("tied "), **FAMILIES[family])
    loaded = load(write_gguf(model, tmp_path / "m.gguf"), tmp_path)
    assert_same(exact_logits(loaded), transformers_logits(model))
    assert isinstance(loaded.model.lm_head, GgmlLinear) == (way == "in blocks")


@pytest.mark.parametrize("kind", [*sorted(BLOCK_TYPES), "F16", "BF16"])
def test_each_type_has_the_numbers_that_transformers_reads(kind: str, way: str, tmp_path: Path) -> None:
    path = write_gguf(small_model("llama"), tmp_path / "m.gguf", kind)
    whole = GgufConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, quantization_config=whole, dtype=torch.float32)
    assert_same(exact_logits(load(path, tmp_path)), transformers_logits(theirs))
