"""Greedy output equals `generate` when prefixes moved to the host tier and back."""

from pathlib import Path

import pytest
from tests.models import save_model
from tests.worker.exactness.harness import LENGTHS, Engine, generate, make_prompts

from fairlead_worker.model.loader import load_model

CHOSEN = [i for i, length in enumerate(LENGTHS) if 15 <= length <= 129]
PROMPTS = [make_prompts()[i] for i in CHOSEN]
"""Eleven: 581 tokens and 220 of output, for a device with pages for 200."""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prefixes_come_back_from_the_host(family: str, tmp_path: Path) -> None:
    """Those of models with windows: test_windows."""
    model = save_model(family, tmp_path)
    expected = generate(model, PROMPTS)
    loaded = load_model(str(tmp_path))
    for backend in ("auto", "reference"):
        engine = Engine(loaded, chunk=64, pages=50, page_size=4, backend=backend, host_slots=250)
        assert [engine.serve([prompt])[0] for prompt in PROMPTS] == expected
        warm = [engine.serve_counted([prompt])[0] for prompt in PROMPTS]
        assert [tokens for tokens, _ in warm] == expected
        assert [cached for _, cached in warm] == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS], "nothing was lost"
        host = engine.scheduler.load().host
        assert host is not None and host.cached_tokens > 300 and host.dropped == 0


@pytest.mark.parametrize("tokens", [20, 1000])
@pytest.mark.parametrize(
    "settings",
    [
        {"chunk": 64, "page_size": 4},
        {"chunk": 0, "page_size": 4, "policy": "fcfs"},
        {"chunk": 16, "page_size": 1, "policy": "lpm"},
        {"chunk": 64, "page_size": 16, "enable_mixed_chunk": False},
        {"chunk": 32, "page_size": 4, "policy": "lpm", "dedupe_tokens": 1},
        {"chunk": 64, "page_size": 4, "itl_target_ms": 5},
    ],
    ids=str,
)
def test_scheduling_over_two_tiers_changes_no_token(settings: dict, tokens: int, llama: tuple) -> None:
    """Batches too large for the device, over a host tier of `tokens`: chunks, retractions, saves and loads in the same steps."""
    loaded, expected = llama
    settings = settings | {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
    chunk, page_size = settings.pop("chunk"), settings.pop("page_size")
    engine = Engine(loaded, chunk, pages=200 // page_size, page_size=page_size, host_slots=tokens // page_size, settings=settings)
    for _ in range(2):
        assert engine.serve(PROMPTS) == expected
    load = engine.scheduler.load()
    assert load.host is not None and load.host.saved > 0 and load.evicted_pages > load.pages_total
    assert load.host.dropped > 0 or tokens == 1000
    assert load.host.cached_tokens > 0 or tokens < 1000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = tmp_path_factory.mktemp("llama")
    model = save_model("llama", folder)
    return load_model(str(folder)), generate(model, PROMPTS)


def test_sampled_tokens_are_the_same_too(llama: tuple) -> None:
    loaded, greedy = llama
    sampling = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
    plain = Engine(loaded, chunk=0)
    expected = [plain.serve([prompt], root=i, **sampling)[0] for i, prompt in enumerate(PROMPTS)]
    assert expected != greedy
    engine = Engine(loaded, chunk=64, pages=50, page_size=4, host_slots=250)
    for _ in range(2):
        assert engine.serve(PROMPTS, **sampling) == expected
    assert engine.scheduler.load().host.cached_tokens > 0
