"""Models with recurrent layers: the cache of states changes no token, and gives hits that are as long as its blocks allow."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.lora import save_adapter
from tests.models import build_model
from tests.worker.exactness.cases import NGRAM, Case, check_cold_and_warm, check_preempted, make_case
from tests.worker.exactness.harness import Engine, generate

from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.scheduler.plan import Row, StepPlan

MODELS = ["qwen3_next", "falcon_h1", "mamba2", "jamba"]
DRAFT: dict[str, Any] = {"speculative_method": "draft", "speculative_break_even": 10_000}
OPTIMIST = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}


class Oracle:
    """Drafts what `generate` says, and at every seventh place another token."""

    forwards = 0

    def __init__(self, case: Case) -> None:
        self._texts = [prompt + expected for prompt, expected in zip(case.prompts, case.expected, strict=True)]

    def draft(self, plan: StepPlan) -> "Oracle":
        self._plan = replace(plan, rows=[self._with_draft(row) if row.num_drafts else row for row in plan.rows])
        return self

    def read(self) -> StepPlan:
        return self._plan

    def _with_draft(self, row: Row) -> Row:
        text, known = self._texts[int(row.request.id) % len(self._texts)], len(row.request.tokens)
        return row.with_draft(row.num_drafts, [text[place] ^ (place % 7 == 0) for place in range(known, known + row.num_drafts)])


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param, 333)


@pytest.mark.parametrize(
    ("chunk", "page_size", "backend"), [(0, 16, "auto"), (16, 16, "auto"), (64, 4, "cpu"), (512, 5, "reference")], ids=str
)
def test_batched_cold_and_warm(case: Case, chunk: int, page_size: int, backend: str) -> None:
    check_cold_and_warm(case, chunk, page_size, backend)


def test_preempted_and_evicted(case: Case) -> None:
    """With too few snapshots too. The rest is reused."""
    assert check_preempted(case, 100, snapshots=6, max_num_seqs=256).cached_tokens


@pytest.mark.parametrize("chunk", [16, 0])
def test_a_state_goes_back_behind_a_rejected_token(case: Case, chunk: int) -> None:
    """Drafts of which each length is accepted now and then: cold, warm, and with too few pages and slots."""
    for pages, snapshots in ((4096, 0), (100, 10)):
        engine = Engine(case.loaded, chunk, pages=pages, page_size=4, snapshots=snapshots, settings=OPTIMIST | DRAFT)
        engine.runner.drafter = Oracle(case)  # type: ignore[assignment]  # in the place of a model that drafts
        for _ in range(2):
            assert engine.serve(case.prompts) == case.expected
        load = engine.scheduler.load()
        assert load.drafts is not None and all(load.drafts.accepted_at) and load.drafts.accepted < load.drafts.tokens
        assert (load.preemptions > 0) == (snapshots > 0)


def test_look_ups(case: Case) -> None:
    assert check_preempted(case, 100, snapshots=6, max_num_seqs=256, **NGRAM).cached_tokens


def test_a_draft_model() -> None:
    """Beside states it has pages alone."""
    case = make_case("qwen3_next", 333)
    engine = Engine(case.loaded, chunk=48, settings=DRAFT, draft=make_case("llama", 333).loaded)
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    drafts = engine.scheduler.load().drafts
    assert drafts is not None and drafts.tokens > 100


def test_a_host_tier_keeps_pages_whose_states_are_on_the_device() -> None:
    case = make_case("qwen3_next", 333)
    chosen = [place for place, prompt in enumerate(case.prompts) if 15 <= len(prompt) <= 129]
    engine = Engine(case.loaded, chunk=64, pages=50, page_size=4, host_slots=500)
    for _ in range(2):
        assert [engine.serve([case.prompts[place]])[0] for place in chosen] == [case.expected[place] for place in chosen]
    load = engine.scheduler.load()
    assert load.host is not None and load.host.loaded


def test_a_conversation_that_grows_is_computed_once() -> None:
    case = make_case("qwen3_next", 333)
    engine, text = Engine(case.loaded, chunk=64), list(case.prompts[10])
    for _ in range(4):
        [(answer, cached)] = engine.serve_counted([text], max_tokens=40)
        cold = Engine(case.loaded, chunk=0).serve([text], max_tokens=40)[0]
        assert answer == cold and (len(text) == len(case.prompts[10]) or cached >= len(text) - 50 - 32)
        text += [*answer, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31]


@pytest.mark.parametrize(
    ("family", "targets"), [("qwen3_next", ["q_proj", "in_proj_qkvz", "out_proj"]), ("jamba", ["in_proj", "x_proj", "dt_proj"])], ids=str
)
def test_adapters_of_recurrent_layers(family: str, targets: list[str], tmp_path: Path) -> None:
    """In steps with rows that have none."""
    merged = save_adapter(build_model(family), tmp_path, 0, targets=targets)
    case = make_case(family, 333)
    adapters = AdapterSet(case.loaded, 1, 64)
    adapters.load(1, "a", "file:///a", tmp_path)
    prompts = case.prompts[4:12]
    adapted = generate(merged, prompts)
    engine = Engine(case.loaded, chunk=48, adapters=adapters)
    for _ in range(2):
        numbers = [place % 2 for place in range(len(prompts))]
        expected = [adapted[place] if number else case.expected[4 + place] for place, number in enumerate(numbers)]
        assert engine.serve(prompts, adapters=numbers) == expected
    adapters.unload(1)
