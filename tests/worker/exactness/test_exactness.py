"""Greedy output to prompts of up to 2,000 tokens equals transformers' `generate`, token for token, in float32. `test_families.py` has
shorter ones, of all families.
"""

import pytest
from tests.models import FAMILIES
from tests.worker.exactness.cases import Case, check_cold_and_warm, make_case
from tests.worker.exactness.harness import LENGTHS, NEW_TOKENS, Engine

CHUNKS = {"16": 16, "64": 64, "512": 512, "off": 0}


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_the_expected_text_is_varied(case: Case) -> None:
    """A model that repeats itself would agree with anything."""
    assert all(len(tokens) == NEW_TOKENS for tokens in case.expected)
    assert len({token for tokens in case.expected for token in tokens}) > 50
    assert len({tuple(tokens) for tokens in case.expected}) == len(LENGTHS)


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_batched_cold_and_warm(case: Case, chunk: int) -> None:
    engine = check_cold_and_warm(case, chunk)
    assert chunk == 0 or engine.mixed_steps > 10


def test_the_reference_backend_says_the_same(case: Case) -> None:
    """The other tests run on what `auto` chooses."""
    engine = Engine(case.loaded, chunk=64, backend="reference")
    assert engine.runner.backend.name != Engine(case.loaded, chunk=64).runner.backend.name
    assert engine.serve(case.prompts) == case.expected
    assert engine.serve(case.prompts) == case.expected


def test_alone_on_a_warm_cache(case: Case) -> None:
    engine = Engine(case.loaded, chunk=64)
    engine.serve(case.prompts)
    assert [engine.serve([prompt])[0] for prompt in case.prompts] == case.expected


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_sizes(page_size: int) -> None:
    case = make_case("gemma2")
    engine = Engine(case.loaded, chunk=64, pages=16384 // page_size, page_size=page_size)
    assert engine.serve(case.prompts) == case.expected
    assert engine.serve(case.prompts) == case.expected


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_cache() -> None:
    case = make_case("llama")
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
    cold = Engine(case.loaded, chunk=0)
    expected = [cold.serve([prompt], root=i, **sampling)[0] for i, prompt in enumerate(case.prompts)]
    assert expected != case.expected
    for chunk in (16, 512):
        engine = Engine(case.loaded, chunk)
        assert engine.serve(case.prompts, **sampling) == expected
        assert engine.serve(case.prompts, **sampling) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_mixed_chunk": False},
        {"itl_target_ms": 5},
        {"policy": "lpm"},
        {"policy": "lpm", "itl_target_ms": 30},
        {"policy": "fcfs", "enable_mixed_chunk": False},
    ],
    ids=str,
)
def test_scheduling_changes_no_token(settings: dict[str, float]) -> None:
    """`test_combinations.py` has the same with other page sizes."""
    case = make_case("llama")
    engine = Engine(case.loaded, chunk=64, settings=settings)
    assert engine.serve(case.prompts) == case.expected
    assert engine.serve(case.prompts) == case.expected
