"""Every pair of settings together: greedy output still equals transformers' `generate`, cold and warm.

One line in `DIMENSIONS` for each mechanism. A name that is a field of `SchedulerConfig` is given to it; what the others mean is in `build`.
"""

from dataclasses import fields
from itertools import combinations, product

import pytest
from tests.models import save_model

from fairlead_worker.engine.config import POLICIES, SchedulerConfig
from fairlead_worker.model.loader import load_model

from .harness import NEW_TOKENS, Engine, generate, make_prompts
from .pairwise import Case, pairwise
from .test_exactness import Case as Family

DIMENSIONS: dict[str, tuple[object, ...]] = {
    "policy": POLICIES,
    "page_size": (1, 4, 16, 64),
    "chunk": (0, 16, 48, 512),
    "prefill_max_requests": (0, 1, 3),
    "enable_mixed_chunk": (True, False),
    "itl_target_ms": (0, 5),
    "dedupe_tokens": (32, 0),
    "n": (1, 3),
    "memory": ("plenty", "scarce"),
    "backend": ("auto", "reference"),
    "family": ("llama", "gemma2"),
}
SCARCE = 512
"""Tokens of KV: the longest prompts fit alone, and not together."""
LENGTHS = range(1, 14)
"""Prompts of the suite that are used: 2 to 333 tokens."""


def allowed(case: Case) -> bool:
    """An ITL target is kept by the size of chunks."""
    return not case.get("itl_target_ms") or case.get("chunk") != 0


CASES = list(pairwise(DIMENSIONS, allowed))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    made = {}
    for family in DIMENSIONS["family"]:
        folder = tmp_path_factory.mktemp(str(family))
        model = save_model(str(family), folder)
        prompts = [make_prompts()[i] for i in LENGTHS if len(make_prompts()[i]) <= 333]
        made[str(family)] = Family(str(family), load_model(str(folder)), prompts, generate(model, prompts))
    return made


def build(case: Case, family: Family) -> Engine:
    settings = {field.name: case[field.name] for field in fields(SchedulerConfig) if field.name in case}
    size, tokens = int(str(case["page_size"])), 16384
    if case["memory"] == "scarce":
        tokens = SCARCE
        settings |= {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    return Engine(
        family.loaded,
        chunk=int(str(case["chunk"])),
        pages=tokens // size,
        page_size=size,
        settings=settings,  # type: ignore[arg-type]  # each has its field's type
        backend=str(case["backend"]),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_no_pair_of_settings_changes_a_token(case: Case, families: dict[str, Family]) -> None:
    family, n = families[str(case["family"])], int(str(case["n"]))
    engine = build(case, family)
    prompts = [prompt for prompt in family.prompts for _ in range(n)]
    expected = [tokens for tokens in family.expected for _ in range(n)]
    assert engine.serve(prompts) == expected
    assert engine.serve(prompts) == expected, "warm"


def test_every_pair_is_there() -> None:
    seen = {pair for case in CASES for pair in combinations(case.items(), 2)}
    for a, b in combinations(DIMENSIONS, 2):
        for x, y in product(DIMENSIONS[a], DIMENSIONS[b]):
            assert ((a, x), (b, y)) in seen or not allowed({a: x, b: y}), (a, x, b, y)
    assert all(map(allowed, CASES))
    assert len(CASES) < 30


def test_scarce_memory_retracts(families: dict[str, Family]) -> None:
    """Or that dimension would test nothing."""
    case = next(case for case in CASES if case["memory"] == "scarce" and case["policy"] == "lpm")
    engine = build(case, families[str(case["family"])])
    family = families[str(case["family"])]
    assert [len(tokens) for tokens in engine.serve(family.prompts)] == [NEW_TOKENS] * len(family.prompts)
    assert engine.scheduler.load().retractions > 0
