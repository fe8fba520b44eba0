"""A model over two ranks gives the answers of one: transformers' `generate`, token for token, in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.parallel.pair import Pair

from fairlead_worker.model.catalog import SERVED
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.trial import trial_logits

PROMPTS = make_prompts()[:13]
"""Up to 200 tokens, some with prefixes in common."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "one KV head for both ranks, and biases": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3 with its embedding for a head": ("qwen3", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "phi, whose head has a bias": ("phi", {}),
    "projections of each head side by side": ("gpt_neox", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "latents": ("deepseek_v3", dict(SERVED["deepseek_v3"].settings)),
    "latents, and a vector of queries": ("deepseek_v2", SERVED["deepseek_v2"].settings | {"q_lora_rank": None}),
    "layers that read the KV of others": ("gemma3n_text", dict(SERVED["gemma3n (text)"].settings)),
    "the same, with heads of two sizes": ("gemma4_text", dict(SERVED["gemma4 (text)"].settings)),
    "chunks, and experts beside an MLP": ("llama4_text", SERVED["llama4 (text)"].settings | {"attention_chunk_size": 32}),
    "a vocabulary that two do not divide": ("llama", {"vocab_size": 511}),
}


@pytest.mark.parametrize(("family", "changes"), MODELS.values(), ids=MODELS)
def test_two_ranks_are_one_model(pair: Pair, tmp_path: Path, family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if family not in FAMILIES:
        monkeypatch.setitem(FAMILIES, family, (family, FAMILIES["llama"][1]))
    model = save_model(family, tmp_path, **changes)
    prompts = [[token % 511 for token in prompt] for prompt in PROMPTS]
    expected = generate(model, prompts)
    single = load_model(str(tmp_path))
    drawn = Engine(single, chunk=64, pages=512).serve(prompts, temperature=0.8, top_p=0.9, seed=5)
    want = trial_logits(single.model)
    speculation = {"speculative_method": "ngram", "speculative_num_tokens": 3} if family == "llama" else {}
    with pair.engine(tmp_path, chunk=64, settings=speculation) as engine:
        assert engine.loaded.ranks == 2
        whole, part = ([(layer.heads, layer.kv_heads) for layer in loaded.layers] for loaded in (single, engine.loaded))
        assert part == [(heads // 2, max(1, kv_heads // 2)) for heads, kv_heads in whole]
        cold = engine.serve(prompts)
        assert cold == expected
        assert engine.mixed_steps > 0, "chunks and decodes shared steps"
        warm = engine.serve_counted(prompts)
        assert [tokens for tokens, _ in warm] == expected
        assert [cached for _, cached in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        assert engine.serve(prompts, temperature=0.8, top_p=0.9, seed=5) == drawn
        if family == "llama":
            scored = engine.serve(prompts[:3], root=9, prompt_logprobs=2)
            assert scored == expected[:3] and engine.scored == [len(prompt) - 1 for prompt in prompts[:3]]
    # The bound in docs/guides/tensor-parallel.md: sums in another order, and nothing else.
    assert engine_difference(pair, tmp_path, want) < 1e-5


def engine_difference(pair: Pair, folder: Path, want: torch.Tensor) -> float:
    """Of logits, over the largest of them."""
    with pair.engine(folder, chunk=0) as engine:
        step_logits = [output.logprobs[0] for output in engine.outputs([[0]], logprobs=5)[0]]
    alone = Engine(load_model(str(folder)), chunk=0, pages=512)
    expected = [output.logprobs[0] for output in alone.outputs([[0]], logprobs=5)[0]]
    assert [each.top_ids for each in step_logits] == [each.top_ids for each in expected]
    pairs = [
        pair for got, known in zip(step_logits, expected, strict=True) for pair in zip(got.top_logprobs, known.top_logprobs, strict=True)
    ]
    return max(abs(got - known) for got, known in pairs) / want.abs().max().item()


def test_pages_go_to_the_host_and_come_back_on_every_rank(pair: Pair, tmp_path: Path) -> None:
    model = save_model("llama", tmp_path)
    prompts = PROMPTS[3:9]
    expected = generate(model, prompts)
    with pair.engine(tmp_path, pages=40, page_size=4, host_slots=250, chunk=64) as engine:
        for _ in range(2):
            assert [engine.serve([prompt])[0] for prompt in prompts] == expected
        host = engine.scheduler.load().host
        assert host is not None and host.cached_tokens > 40
