"""Models with recurrent layers: the cache of states changes no token, and gives hits that are as long as its blocks allow."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from tests.lora import save_adapter
from tests.models import build_model, save_model
from tests.worker.exactness.harness import Engine, generate, make_prompts
from tests.worker.exactness.test_exactness import Case

from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import load_model

PROMPTS = [prompt for prompt in make_prompts() if len(prompt) <= 333]
MODELS = ["qwen3_next", "falcon_h1", "mamba2", "jamba"]
OPTIMIST = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@cache
def make_case(name: str) -> Case:
    with TemporaryDirectory() as folder:
        model = save_model(name, Path(folder))
        return Case(name, load_model(folder), PROMPTS, generate(model, PROMPTS))


@pytest.mark.parametrize(
    ("chunk", "page_size", "backend"), [(0, 16, "auto"), (16, 16, "auto"), (64, 4, "cpu"), (512, 5, "reference")], ids=str
)
def test_batched_cold_and_warm(case: Case, chunk: int, page_size: int, backend: str) -> None:
    engine = Engine(case.loaded, chunk, pages=16384 // page_size, page_size=page_size, backend=backend)
    assert engine.serve(case.prompts) == case.expected
    warm = engine.serve_counted(case.prompts)
    assert [tokens for tokens, _ in warm] == case.expected
    block = 2 * page_size
    assert [cached for _, cached in warm] == [(len(prompt) - 1) // block * block for prompt in PROMPTS]


def test_preempted_and_evicted(case: Case) -> None:
    """With too few pages and snapshots, requests are preempted and prefixes are evicted. The rest is reused."""
    engine = Engine(case.loaded, chunk=64, pages=100, page_size=4, snapshots=6, settings=OPTIMIST | {"max_num_seqs": 256})
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    load = engine.scheduler.load()
    assert load.preemptions and load.evicted_pages > load.pages_total and load.cached_tokens


def test_a_host_tier_keeps_pages_whose_states_are_on_the_device() -> None:
    case = make_case("qwen3_next")
    chosen = [place for place, prompt in enumerate(case.prompts) if 15 <= len(prompt) <= 129]
    engine = Engine(case.loaded, chunk=64, pages=50, page_size=4, host_slots=500)
    for _ in range(2):
        assert [engine.serve([case.prompts[place]])[0] for place in chosen] == [case.expected[place] for place in chosen]
    load = engine.scheduler.load()
    assert load.host is not None and load.host.loaded


def test_a_conversation_that_grows_is_computed_once() -> None:
    case = make_case("qwen3_next")
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
    case = make_case(family)
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
