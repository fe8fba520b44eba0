"""Greedy output of every family that is served equals transformers' `generate`, in every setting, across windows, pages and blocks.

For all families together, one pass of transformers over each prompt and its output confirms every token, which takes a tenth of `generate`.
"""

import re
from pathlib import Path

import pytest
from tests.lora import save_adapter
from tests.models import LENGTH, build_model, save_model, save_refused
from tests.worker.exactness.cases import Case, check_cold_and_warm, check_host_tier, check_preempted, few_pages, short_prompts
from tests.worker.exactness.harness import Engine, confirm_greedy, generate, make_prompts
from tests.worker.model.checkpoints import save_mxfp4

from fairlead_worker.errors import AdapterError, ModelLoadError
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.catalog import ORIGINAL, REFUSED, SERVED
from fairlead_worker.model.loader import load_model
from fairlead_worker.model.mechanisms import describe_mechanisms
from fairlead_worker.native.library import native

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) in (2, 17, 33, 64, 129, 200, 333)]
LONG = [prompt for prompt in PROMPTS if len(prompt) > ORIGINAL]


@pytest.mark.parametrize("name", SERVED)
def test_it_says_what_generate_says(name: str, tmp_path: Path) -> None:
    """One test for each family, with all settings. Two ranks are in `parallel/test_families.py`."""
    model, loaded = save_model(name, tmp_path), load_model(str(tmp_path))
    prompts = short_prompts(loaded)
    alone = Engine(loaded, chunk=0, prefix_cache=False)
    expected = [alone.serve([prompt])[0] for prompt in prompts]
    confirm_greedy(model, prompts, expected)
    case = Case(name, loaded, prompts, expected)
    assert len({token for tokens in case.expected for token in tokens}) > 50, "a model that repeats itself would agree with anything"
    assert len({tuple(tokens) for tokens in case.expected}) == len(prompts)
    check_listed(name, alone)
    for chunk in (16, 64, 512):
        assert check_cold_and_warm(case, chunk).mixed_steps > 1, "chunks beside decodes"
    uncached = Engine(loaded, chunk=64, prefix_cache=False).serve_counted(prompts)
    assert uncached == [(tokens, 0) for tokens in case.expected]
    pages, snapshots = few_pages(alone, prompts), 6 if loaded.states else 0
    check_preempted(case, pages, snapshots)
    if loaded.layers:  # otherwise there is no KV for a host tier
        check_host_tier(case, pages, snapshots)


def check_listed(name: str, engine: Engine) -> None:
    family, loaded = SERVED[name], engine.loaded
    assert describe_mechanisms(loaded.model.config, loaded.layers, bool(loaded.states)) == family.mechanisms
    if native() is not None:
        assert engine.runner.path == family.path


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    save_refused(name, tmp_path)
    with pytest.raises(ModelLoadError, match=re.escape(REFUSED[name].reason)):
        load_model(str(tmp_path), max_model_len=16)


def test_gpt_oss_as_it_is_published_with_experts_in_mxfp4(tmp_path: Path) -> None:
    expected = generate(save_mxfp4(tmp_path), PROMPTS)
    assert len({token for tokens in expected for token in tokens}) > 25
    assert Engine(load_model(str(tmp_path), dtype="float32"), chunk=48).serve(PROMPTS) == expected


def test_longrope_within_and_beyond_its_original_length(tmp_path: Path) -> None:
    """Which frequencies it serves with, the longest text decides, once for all: cached KV is shared by texts of any length."""
    model = save_model("longrope", tmp_path)
    short = [prompt for prompt in PROMPTS if len(prompt) + 20 <= ORIGINAL]
    within = load_model(str(tmp_path))
    assert within.max_model_len == ORIGINAL
    assert Engine(within, chunk=48).serve(short) == generate(model, short)
    beyond = load_model(str(tmp_path), max_model_len=LENGTH)
    for natively in (True, False):
        engine = Engine(beyond, chunk=48, native_decoder=natively)
        engine.serve(short)
        for _ in range(2):
            assert engine.serve(LONG) == generate(model, LONG)


def test_a_rope_that_is_another_for_each_length_is_refused_beyond_the_first(tmp_path: Path) -> None:
    rope = SERVED["dynamic rope"].config["rope_parameters"]
    save_model("dynamic rope", tmp_path, rope_parameters=rope | {"original_max_position_embeddings": 64})
    assert load_model(str(tmp_path)).max_model_len == 64
    with pytest.raises(ModelLoadError, match="beyond 64 tokens its rope"):
        load_model(str(tmp_path), max_model_len=65)


@pytest.mark.parametrize("name", ["hunyuan_v1_dense with a stretched rope", "hunyuan_v1_moe with a stretched rope"])
def test_a_rope_that_is_called_dynamic_and_stretched_once_serves_the_whole_context(name: str, tmp_path: Path) -> None:
    save_model(name, tmp_path)
    assert load_model(str(tmp_path)).max_model_len == LENGTH > ORIGINAL


def test_adapters_of_a_model_with_experts(tmp_path: Path) -> None:
    """Attention is adapted as anywhere; experts are not, and that is said."""
    save_model("qwen3_moe", tmp_path / "base")
    merged = save_adapter(build_model("qwen3_moe"), tmp_path / "a", 0, targets=["q_proj", "o_proj"])
    loaded = load_model(str(tmp_path / "base"))
    adapters = AdapterSet(loaded, 2, 64)
    adapters.load(1, "a", "file:///a", tmp_path / "a")
    expected = generate(merged, PROMPTS)
    assert Engine(loaded, chunk=48, adapters=adapters).serve(PROMPTS, adapters=[1] * len(PROMPTS)) == expected
    save_adapter(build_model("qwen3_moe"), tmp_path / "b", 1, targets=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    with pytest.raises(AdapterError, match="experts"):
        adapters.load(2, "b", "file:///b", tmp_path / "b")
