"""Every pair of settings together: greedy output still equals transformers' `generate`, cold and warm.

One line in `DIMENSIONS` for each mechanism. A name that is a field of `SchedulerConfig` is given to it; what the others mean is in `build`.
"""

from dataclasses import dataclass, fields
from itertools import combinations, product

import pytest
from tests.models import save_model
from tests.worker.exactness.cases import Case as Family
from tests.worker.exactness.harness import NEW_TOKENS, Engine, generate, make_prompts
from tests.worker.exactness.pairwise import Case, pairwise
from tests.worker.exactness.test_speculation import half_as_good

from fairlead_common.scheduling_policy import POLICIES
from fairlead_worker.model.loader import LoadedModel, load_model
from fairlead_worker.scheduler.config import SchedulerConfig

DIMENSIONS: dict[str, tuple[object, ...]] = {
    "policy": POLICIES,
    "page_size": (1, 4, 16, 64),
    "chunk": (0, 16, 48, 512),
    "prefill_max_requests": (0, 1, 3),
    "idle_prefill_chunks": (1, 5),
    "enable_mixed_chunk": (True, False),
    "itl_target_ms": (0, 5),
    "dedupe_tokens": (32, 0),
    "n": (1, 3),
    "memory": ("plenty", "scarce"),
    "backend": ("auto", "reference"),
    "native_decoder": (True, False),
    "speculative_method": ("none", "ngram", "draft"),
    "host_tokens": (0, 1024),
    "scores": (None, 2),
    "family": ("llama", "gemma2"),
}
SPECULATE = {"speculative_ngram_min": 1, "speculative_break_even": 10_000}
"""Drafts in every step, also among chunks and in large batches."""
SCARCE = 512
"""Tokens of KV: the longest prompts fit alone, but not together."""
LENGTHS = range(1, 14)
"""Number of the suite's prompts in use: 2 to 333 tokens."""


def allowed(case: Case) -> bool:
    """The chunk size keeps an ITL target."""
    return not case.get("itl_target_ms") or case.get("chunk") != 0


@dataclass(frozen=True)
class Prepared:
    """A family's case, and a model whose drafts are right now and then."""

    case: Family
    draft: LoadedModel


CASES = list(pairwise(DIMENSIONS, allowed))


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prepared]:
    made = {}
    for family in DIMENSIONS["family"]:
        folder = tmp_path_factory.mktemp(str(family))
        model = save_model(str(family), folder)
        prompts = [make_prompts()[i] for i in LENGTHS if len(make_prompts()[i]) <= 333]
        case = Family(str(family), load_model(str(folder)), prompts, generate(model, prompts))
        made[str(family)] = Prepared(case, half_as_good(case.loaded, tmp_path_factory.mktemp("draft"), str(family)))
    return made


def build(case: Case, family: Prepared) -> Engine:
    settings = {field.name: case[field.name] for field in fields(SchedulerConfig) if field.name in case}
    size, tokens = int(str(case["page_size"])), 16384
    if case["memory"] == "scarce":
        tokens = SCARCE
        settings |= {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    return Engine(
        family.case.loaded,
        chunk=int(str(case["chunk"])),
        pages=tokens // size,
        page_size=size,
        settings=settings | SPECULATE,  # type: ignore[arg-type]  # each has its field's type
        backend=str(case["backend"]),
        host_slots=int(str(case["host_tokens"])) // size,
        draft=family.draft if case["speculative_method"] == "draft" else None,
        native_decoder=bool(case["native_decoder"]),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_no_pair_of_settings_changes_a_token(case: Case, families: dict[str, Prepared]) -> None:
    family, n = families[str(case["family"])], int(str(case["n"]))
    engine = build(case, family)
    prompts = [prompt for prompt in family.case.prompts for _ in range(n)]
    expected = [tokens for tokens in family.case.expected for _ in range(n)]
    scores = None if case["scores"] is None else int(str(case["scores"]))
    for turn in ("cold", "warm"):
        assert engine.serve(prompts, prompt_logprobs=scores) == expected, turn
        assert engine.scored == [0 if scores is None else len(prompt) - 1 for prompt in prompts], turn


def test_every_pair_is_there() -> None:
    seen = {pair for case in CASES for pair in combinations(case.items(), 2)}
    for a, b in combinations(DIMENSIONS, 2):
        for x, y in product(DIMENSIONS[a], DIMENSIONS[b]):
            assert ((a, x), (b, y)) in seen or not allowed({a: x, b: y}), (a, x, b, y)
    assert all(map(allowed, CASES))
    assert len(CASES) < 30


def test_settings_do_what_they_are_there_for(families: dict[str, Prepared]) -> None:
    """Otherwise the dimensions would test nothing: memory runs out, pages return from the host, drafts are right and wrong."""
    for method in ("ngram", "draft"):
        case = next(each for each in CASES if each["memory"] == "scarce" and each["family"] == "llama") | {
            "speculative_method": method,
            "host_tokens": 1024,
            "policy": "lpm",
            "n": 1,
            "page_size": 4,
        }
        engine, family = build(case, families["llama"]), families["llama"].case
        for _ in range(2):
            assert [len(tokens) for tokens in engine.serve(family.prompts)] == [NEW_TOKENS] * len(family.prompts)
        load = engine.scheduler.load()
        assert load.preemptions > 0
        assert load.host is not None and load.host.loaded > 0
        assert load.drafts is not None and 0 < load.drafts.accepted < load.drafts.tokens
