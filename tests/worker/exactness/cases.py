"""Cases of the exactness suite: a small model as it is served, its prompts, and what `generate` says to them. And checks of any case."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.models import save_model
from tests.worker.exactness.harness import NEW_TOKENS, SHORT_LENGTHS, Engine, generate, make_prompts

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.ipc.messages import Load
from fairlead_worker.model.loader import LoadedModel, load_model

OPTIMIST = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
"""A scheduler that expects no output: with too few pages it preempts requests."""
NGRAM: dict[str, Any] = {"speculative_method": "ngram", "speculative_ngram_min": 1, "speculative_break_even": 10_000}


@dataclass
class Case:
    """One family: the model as served, and what it ought to say."""

    family: str
    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[list[int]]


@cache
def make_case(family: str, longest: int = 2000, **changes: int) -> Case:
    """Return the case of a family, with `changes` of its config, the same one for all tests: `generate` takes seconds.

    longest: of its prompts.
    """
    prompts = [prompt for prompt in make_prompts() if len(prompt) <= longest]
    with TemporaryDirectory() as folder:
        model = save_model(family, Path(folder), **changes)
        return Case(family, load_model(folder), prompts, generate(model, prompts))


def short_prompts(loaded: LoadedModel) -> list[list[int]]:
    """Return 20 prompts of up to 333 tokens, or those of them that the model has room for."""
    return [prompt for prompt in make_prompts(SHORT_LENGTHS) if len(prompt) + NEW_TOKENS <= loaded.max_model_len]


def few_pages(engine: Engine, prompts: list[list[int]]) -> int:
    """Return how many pages of 4 tokens the longest prompt needs with its output, and a few. engine: any one of the model."""
    cache, pages = engine.scheduler.cache, -(-(max(map(len, prompts)) + NEW_TOKENS) // 4)
    if isinstance(cache, GroupedPrefixCache):
        pages = -(-cache.groups.pages(pages, 4, 64 // 4) // cache.groups.count)
    return pages + 6


def check_alone(case: Case) -> Engine:
    """Serve each prompt alone and whole, without a prefix cache."""
    engine = Engine(case.loaded, chunk=0, prefix_cache=False)
    assert [engine.serve([prompt])[0] for prompt in case.prompts] == case.expected
    return engine


def check_cold_and_warm(case: Case, chunk: int, page_size: int = 16, backend: str = "auto") -> Engine:
    """Serve all prompts together, twice. The second time all whole pages short of the last token are hits, with states at least all whole
    blocks.
    """
    engine = Engine(case.loaded, chunk, pages=16384 // page_size, page_size=page_size, backend=backend)
    assert engine.serve(case.prompts) == case.expected
    warm = engine.serve_counted(case.prompts)
    assert [tokens for tokens, _ in warm] == case.expected
    unit = page_size * (2 if case.loaded.states else 1)
    for prompt, (_, cached) in zip(case.prompts, warm, strict=True):
        assert (len(prompt) - 1) // unit * unit <= cached < len(prompt)
    return engine


def check_preempted(case: Case, pages: int, snapshots: int = 0, **settings: Any) -> Load:
    """Serve twice with too few pages of 4 tokens: requests are preempted, prefixes evicted."""
    engine = Engine(case.loaded, chunk=64, pages=pages, page_size=4, snapshots=snapshots, settings=OPTIMIST | settings)
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    load = engine.scheduler.load()
    assert load.preemptions and load.evicted_pages > load.pages_total
    assert "speculative_method" not in settings or (load.drafts is not None and load.drafts.tokens)
    return load


def check_host_tier(case: Case, pages: int, snapshots: int = 0) -> None:
    """The same over a host tier with room for all: pages come back from it."""
    engine = Engine(case.loaded, chunk=64, pages=pages, page_size=4, host_slots=4000, snapshots=snapshots, settings=OPTIMIST)
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    load = engine.scheduler.load()
    assert load.preemptions and load.host is not None and load.host.loaded and load.host.cached_tokens
