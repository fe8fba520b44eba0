"""Speculation changes no token: greedy equals transformers' `generate`, sampled equals the engine without it, with every method."""

from pathlib import Path

import pytest
import torch
from tests.models import FAMILIES, save_model
from tests.worker.exactness.cases import Case, make_case
from tests.worker.exactness.harness import LENGTHS, Engine

from fairlead_worker.model.loader import LoadedModel, load_model

DRAFT = {"speculative_method": "draft", "speculative_break_even": 10_000}
NGRAM = {"speculative_method": "ngram", "speculative_ngram_min": 1, "speculative_break_even": 10_000}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def half_as_good(loaded: LoadedModel, folder: Path, family: str) -> LoadedModel:
    """The same model with noise on its weights: its drafts are right now and then."""
    save_model(family, folder)
    draft = load_model(str(folder))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, buffer in draft.model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                buffer.add_(0.1 * buffer.std() * torch.randn_like(buffer))
    return draft


def accepted(engine: Engine) -> tuple[int, int]:
    drafts = engine.scheduler.load().drafts
    assert drafts is not None
    return drafts.accepted, drafts.tokens


@pytest.mark.parametrize(("chunk", "page_size"), [(64, 16), (0, 5)])
def test_greedy_with_a_draft_model(case: Case, chunk: int, page_size: int) -> None:
    engine = Engine(case.loaded, chunk, pages=16384 // page_size, page_size=page_size, settings=DRAFT, draft=case.loaded)
    assert engine.serve(case.prompts) == case.expected
    assert engine.serve(case.prompts) == case.expected
    right, guessed = accepted(engine)
    assert right > 0.9 * guessed > 100, "it drafts for itself"


@pytest.mark.parametrize("page_size", [4, 64])
def test_greedy_with_a_look_up(case: Case, page_size: int) -> None:
    engine = Engine(case.loaded, chunk=64, pages=16384 // page_size, page_size=page_size, settings=NGRAM)
    assert engine.serve(case.prompts) == case.expected
    assert accepted(engine)[1] > 20


@pytest.mark.parametrize("settings", [DRAFT, NGRAM], ids=["draft", "ngram"])
def test_retraction(settings: dict[str, float]) -> None:
    case = make_case("llama")
    optimist = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    chosen = [i for i, length in enumerate(LENGTHS) if length <= 333]
    draft = case.loaded if settings is DRAFT else None
    engine = Engine(case.loaded, 256, pages=92, page_size=4, settings=optimist | settings, draft=draft)
    assert engine.serve([case.prompts[i] for i in chosen]) == [case.expected[i] for i in chosen]
    assert engine.scheduler.load().preemptions > 0


SAMPLED = [
    {"temperature": 0.9, "top_p": 0.95, "seed": 5},
    {"temperature": 0.8, "seed": 6, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 7, "allowed_token_ids": (30, 31, 32, 33), "min_tokens": 10},
    {"temperature": 0.0, "allowed_token_ids": (30, 31, 32), "presence_penalty": 0.4},
]


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_sampled_tokens_are_the_same_ones(method: str, tmp_path: Path) -> None:
    case = make_case("qwen3")
    draft = half_as_good(case.loaded, tmp_path / "draft", "qwen3") if method == "draft" else None
    plain = Engine(case.loaded, chunk=64)
    engine = Engine(case.loaded, chunk=64, settings=DRAFT if method == "draft" else NGRAM, draft=draft)
    for sampling in SAMPLED:
        assert engine.serve(case.prompts, **sampling) == plain.serve(case.prompts, **sampling)
    right, guessed = accepted(engine)
    assert 20 < right < 0.9 * guessed, "some guesses are right and some are wrong"


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_mixed_chunk": False},
        {"policy": "lpm", "itl_target_ms": 30},
        {"policy": "lpm", "max_num_seqs": 3},
        {"speculative_num_tokens": 1},
        {"speculative_num_tokens": 12},
    ],
    ids=str,
)
def test_with_every_way_of_scheduling(settings: dict[str, float], tmp_path: Path) -> None:
    case = make_case("mistral")
    engine = Engine(case.loaded, chunk=64, settings=DRAFT | settings, draft=half_as_good(case.loaded, tmp_path / "draft", "mistral"))
    assert engine.serve(case.prompts) == case.expected
    assert engine.serve(case.prompts) == case.expected
    assert accepted(engine)[0] > 10
