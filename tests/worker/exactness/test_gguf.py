"""GGUF files: the engine's answers equal those of transformers, token for token, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_models import write_gguf
from tests.lora import adapter_of
from tests.models import build_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.formats import gguf as reading
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.weights.cache import ModelCache

PROMPTS = [prompt for prompt in make_prompts() if 2 < len(prompt) <= 333]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3": {"tie_word_embeddings": True, "num_hidden_layers": 6, "sliding_window_pattern": 6},
}


def load(path: Path) -> LoadedModel:
    return load_model(path.as_uri(), dtype="float32", cache=ModelCache(path.parent / "cache"))


def theirs(path: Path) -> PreTrainedModel:
    whole = GgufConfig(dequantize=True)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, quantization_config=whole, dtype=torch.float32
    )
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_weights_answer_as_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    """Not as transformers reads the file: it leaves out the head size of Qwen 3, and Gemma's softcaps."""
    model = build_model(family, **FAMILIES[family])
    assert Engine(load(write_gguf(model, tmp_path / "m.gguf")), 64).serve(PROMPTS) == generate(model, PROMPTS)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16"])
def test_widened_blocks_answer_as_transformers_does(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. On a CPU native kernels also round the activations to 8 bits."""
    monkeypatch.setattr(reading, "native", lambda: None)
    path = write_gguf(build_model("llama"), tmp_path / "m.gguf", kind)
    assert Engine(load(path), 64).serve(PROMPTS) == generate(theirs(path), PROMPTS)


def test_adapters_answer_as_pefts_merged_model(tmp_path: Path) -> None:
    loaded = load(write_gguf(build_model("llama"), tmp_path / "m.gguf"))
    want = [generate(build_model("llama"), PROMPTS), generate(adapter_of("llama", tmp_path / "a", seed=1), PROMPTS)]
    adapters = AdapterSet(loaded, 1, 64)
    adapters.load(1, "a", f"file://{tmp_path / 'a'}", tmp_path / "a")
    numbers = [index % 2 for index in range(len(PROMPTS))]
    assert want[0] != want[1]
    answers = Engine(loaded, 64, adapters=adapters).serve(PROMPTS, adapters=numbers)
    assert answers == [want[number][index] for index, number in enumerate(numbers)]
