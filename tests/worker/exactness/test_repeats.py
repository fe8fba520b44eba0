"""Exact repeats of prompts sample from kept logits: on every backend they get the tokens of prompts that are computed."""

from pathlib import Path

import pytest
import torch
from tests.models import save_model
from tests.worker.exactness.harness import LENGTHS, NEW_TOKENS, Engine, generate, make_prompts
from tests.worker.kernels.test_attention import needs_library

from fairlead_worker.execution.kept import slot_bytes
from fairlead_worker.kernels.base import KVSpec
from fairlead_worker.model.loader import LoadedModel, load_model

FAMILIES = ("llama", "gemma3")
PROMPTS = make_prompts()[:13]
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "seed": 7},
    "penalties": {"presence_penalty": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "logprobs": {"logprobs": 3},
}


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, list[list[int]]]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    return load_model(str(folder)), generate(model, PROMPTS)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "cpu", "reference"])
def test_repeats_in_the_same_step_and_later(served: tuple[LoadedModel, list[list[int]]], backend: str, page_size: int) -> None:
    loaded, expected = served
    engine = Engine(loaded, chunk=0, backend=backend, page_size=page_size, kept_prompts=16)
    assert engine.serve([prompt for prompt in PROMPTS for _ in range(3)]) == [tokens for tokens in expected for _ in range(3)]
    assert engine.forwards[0] <= sum(LENGTHS[: len(PROMPTS)]), "each prompt once"
    engine.forwards.clear()
    assert engine.serve(PROMPTS) == expected
    assert engine.forwards == [len(PROMPTS)] * (NEW_TOKENS - 1), "the first tokens need no pass"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_each_repeat_samples_with_its_own_settings(served: tuple[LoadedModel, list[list[int]]], settings: dict[str, float]) -> None:
    loaded, _ = served
    wanted = [(out.tokens, out.logprobs) for outs in Engine(loaded, chunk=0).outputs(PROMPTS, **settings) for out in outs]
    engine = Engine(loaded, chunk=0, kept_prompts=16)
    engine.serve(PROMPTS, temperature=1.0, seed=99)
    got = [(out.tokens, out.logprobs) for outs in engine.outputs(PROMPTS, **settings) for out in outs]
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in wanted]
    for (_, mine), (_, theirs) in zip(got, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one.top_ids == other.top_ids and one.chosen == pytest.approx(other.chosen, abs=1e-3)


def test_repeats_beside_a_scored_prompt(served: tuple[LoadedModel, list[list[int]]]) -> None:
    """A step has prompts with log-probabilities, which repeats have not, and repeats."""
    loaded, expected = served
    engine = Engine(loaded, chunk=0, kept_prompts=16)
    engine.serve(PROMPTS[:6])
    scored = engine.outputs([PROMPTS[7]], prompt_logprobs=1)
    assert sum(len(output.prompt_logprobs) for output in scored[0]) == len(PROMPTS[7]) - 1
    assert engine.serve(PROMPTS[:6]) == expected[:6]


def test_pages_are_copied_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory profile has no room for the pages of all rows of a step."""
    save_model("llama", tmp_path)
    loaded = load_model(str(tmp_path))
    page_bytes = KVSpec(loaded.layers, 16, loaded.dtype, loaded.device).page_bytes
    monkeypatch.setattr("fairlead_worker.execution.kept.STAGING_BYTES", 3 * page_bytes)
    engine = Engine(loaded, chunk=0, backend="reference", kept_prompts=16)
    expected = engine.serve(PROMPTS)
    backend, copied = engine.runner.backend, list[int]()
    write = backend.write_pages
    monkeypatch.setattr(backend, "write_pages", lambda pages, content: (copied.append(len(content)), write(pages, content)))
    assert engine.serve(PROMPTS) == expected
    assert sum(copied) == len(PROMPTS) and max(copied) == 3


def test_a_slot_has_the_bytes_that_the_memory_budget_counts(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    engine = Engine(load_model(str(tmp_path)), chunk=0, kept_prompts=3)
    engine.serve(PROMPTS[:1])
    kept, spec = engine.runner.kept, engine.runner.backend.spec
    assert kept is not None
    held = sum(part.untyped_storage().nbytes() for part in vars(kept).values() if isinstance(part, torch.Tensor))
    assert 0 < held <= 3 * slot_bytes(spec.page_bytes, engine.loaded.vocabulary_size)
