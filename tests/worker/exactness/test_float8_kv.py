"""KV in float8 through the whole engine: rounding is the same in any chunk, so caches, host tier and repeats change nothing."""

from pathlib import Path

import pytest
import torch
from tests.models import save_model
from tests.worker.exactness.harness import Engine, make_prompts

from fairlead_worker.model.loader import load_model

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) <= 100]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_tokens_do_not_depend_on_chunks_cache_and_host_tier(family: str, tmp_path: Path) -> None:
    save_model(family, tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", kv_cache_dtype="fp8")
    whole = Engine(loaded, chunk=4096, backend="reference")
    cold = whole.serve(PROMPTS)
    assert whole.runner.backend.spec.kv_dtype == torch.float8_e4m3fn
    assert whole.serve(PROMPTS) == cold, "cached"
    small = Engine(loaded, chunk=48, backend="reference", pages=40, host_slots=64)
    assert small.serve(PROMPTS) == cold and small.serve(PROMPTS) == cold
    plain = load_model(str(tmp_path), dtype="float32")
    assert Engine(plain, chunk=4096, backend="reference").serve(PROMPTS) != cold, "float8 is in use"
