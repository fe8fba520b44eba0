"""Models with sliding windows or chunks of 32 tokens: the cache by groups changes no token, and holds no more than the windows need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.models import save_model
from tests.worker.exactness.cases import NGRAM, Case, check_alone, check_cold_and_warm, check_preempted, make_case
from tests.worker.exactness.harness import Engine

from fairlead_worker.cache.grouped import GroupedPrefixCache
from fairlead_worker.execution import runner_builder
from fairlead_worker.execution.batch_invariance import check_invariance
from fairlead_worker.execution.runner_builder import RunnerBuilder
from fairlead_worker.model.fixed_rows import fix_rows
from fairlead_worker.model.loader import load_model

WINDOW = 32
OPTIMIST = {"initial_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}
_WINDOW = {"sliding_window": WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("gemma2", _WINDOW, "2 groups of layers, of which 1 keep the last 32 tokens"),
    "gemma3": ("gemma3", _WINDOW, "4 groups of layers, of which 3 keep the last 32 tokens"),
    "gpt_oss": ("gpt_oss", _WINDOW, "2 groups of layers, of which 1 keep the last 32 tokens"),
    "llama4": ("llama4 (text)", {"attention_chunk_size": WINDOW}, "4 groups of layers, of which 3 keep the latest chunk of 32 tokens"),
    "mistral": ("mistral", _WINDOW, "1 group of layers, which keeps the last 32 tokens"),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Case:
    return windowed(request.param)


def windowed(name: str) -> Case:
    family, changes, _ = MODELS[name]
    return make_case(family, 333, **changes)


def test_alone(case: Case) -> None:
    assert check_alone(case).runner.kv_groups in {groups for family, _, groups in MODELS.values() if family == case.family}


@pytest.mark.parametrize(
    ("chunk", "page_size", "backend"), [(16, 16, "auto"), (64, 4, "auto"), (64, 16, "cpu"), (64, 5, "reference")], ids=str
)
def test_batched_cold_and_warm(case: Case, chunk: int, page_size: int, backend: str) -> None:
    check_cold_and_warm(case, chunk, page_size, backend)


@pytest.mark.parametrize("settings", [{}, NGRAM])
def test_preempted_and_evicted(case: Case, settings: dict[str, Any]) -> None:
    """The rest of a prefix that was evicted in part is reused."""
    pages = {"mistral": 30, "gemma3": 50, "llama4 (text)": 50}.get(case.family, 60)
    assert check_preempted(case, pages, **settings).cached_tokens


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss", "llama4"])
def test_batch_invariant(family: str) -> None:
    case = windowed(family)
    fix_rows(case.loaded.model)
    for backend in ("auto", "cpu"):
        engine = Engine(case.loaded, chunk=64, backend=backend, deterministic=True)
        check_invariance(engine.runner)
        assert engine.serve(case.prompts) == case.expected


def _groups_of(case: Case) -> str:
    return next(groups for family, _, groups in MODELS.values() if family == case.family)


def test_pages_of_each_group_go_to_the_host_and_come_back(case: Case) -> None:
    """A device for the longest prompt, over a host tier with room for all of them."""
    pages = {"mistral": 30, "gemma3": 160, "llama4 (text)": 160}.get(case.family, 120)
    for backend in ("auto", "reference"):
        engine = Engine(case.loaded, chunk=64, pages=pages, page_size=4, host_slots=4000, backend=backend)
        assert engine.runner.kv_groups == _groups_of(case)
        assert [engine.serve([prompt])[0] for prompt in case.prompts] == case.expected
        warm = [engine.serve_counted([prompt])[0] for prompt in case.prompts]
        assert [tokens for tokens, _ in warm] == case.expected
        host = engine.scheduler.load().host
        assert host is not None and host.loaded and host.cached_tokens and not host.dropped
        assert host.total == 4000 // engine.scheduler.cache.units, "whole pages, as on the device"
        assert [cached for _, cached in warm] == [(len(prompt) - 1) // 4 * 4 for prompt in case.prompts], "nothing was lost"


@pytest.mark.parametrize("tokens", [20, 1000])
def test_scheduling_over_two_tiers_changes_no_token(case: Case, tokens: int) -> None:
    """Batches too large for the device: chunks, preemptions, saves and loads in the same steps."""
    pages = {"mistral": 30, "gemma3": 50, "llama4 (text)": 50}.get(case.family, 60)
    engine = Engine(case.loaded, chunk=64, pages=pages, page_size=4, host_slots=tokens, settings=OPTIMIST)
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    load = engine.scheduler.load()
    assert load.preemptions and load.host is not None and load.host.saved and (load.host.loaded or tokens == 20)


def test_a_draft_model_speculates_on_the_first_group(case: Case) -> None:
    """Its layers read all tokens, and the first group keeps them: or there is one group. The model drafts for itself."""
    settings = OPTIMIST | {"speculative_method": "draft", "speculative_break_even": 10_000}
    pages = {"mistral": 130, "gemma3": 50, "llama4 (text)": 50}.get(case.family, 60)
    engine = Engine(case.loaded, chunk=64, pages=pages, page_size=4, settings=settings, draft=case.loaded)
    whole = case.family == "mistral"
    assert engine.runner.kv_groups == ("1 group of layers: a draft model reads all tokens" if whole else _groups_of(case))
    for _ in range(2):
        assert engine.serve(case.prompts) == case.expected
    load = engine.scheduler.load()
    assert load.preemptions and load.drafts is not None and load.drafts.accepted > load.drafts.tokens / 2 > 0


def test_layers_of_several_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share groups, which keep what the widest one reads. No family has several: so this one is compared with one group."""
    case = windowed("gemma3")
    layers = [replace(layer, window=9) if layer.window and number % 2 else layer for number, layer in enumerate(case.loaded.layers)]
    assert {layer.window for layer in layers} == {None, 9, WINDOW}
    several = replace(case, loaded=replace(case.loaded, layers=tuple(layers)))
    with monkeypatch.context() as patch:
        patch.setattr(runner_builder, "choose_groups", lambda *_: ((), "not wanted"))
        whole = Engine(several.loaded, chunk=0, backend="reference", native_decoder=False)
    assert whole.runner.backend.spec.num_groups == 1
    several.expected = [whole.serve([prompt], root=root)[0] for root, prompt in enumerate(case.prompts)]
    assert several.expected != case.expected
    for backend in ("auto", "reference"):
        assert check_cold_and_warm(several, 64, 4, backend).runner.kv_groups == _groups_of(case)
    assert check_preempted(several, 50).cached_tokens


def test_a_window_that_no_sequence_exceeds_is_none(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path, sliding_window=WINDOW)
    engine = Engine(load_model(str(tmp_path), max_model_len=WINDOW), chunk=0)
    assert (
        engine.runner.kv_groups == "1 group of layers: no layer has a window below --max-model-len"
        and not engine.runner.backend.spec.groups
    )


@pytest.mark.parametrize(("family", "pages"), [("mistral", 130), ("gemma3", 620)])
def test_a_context_of_32k_holds_what_its_windows_need(family: str, pages: int, tmp_path: Path) -> None:
    """The pool is smaller than the context: 130 pages are 2,080 tokens, and 620 are 9,920."""
    window, length, chunk, new = 1024, 32_000, 512, 100
    save_model(family, tmp_path, sliding_window=window, max_position_embeddings=2 * length)
    engine = Engine(load_model(str(tmp_path)), chunk, pages=pages)
    cache, plan_step, worst = engine.scheduler.cache, engine.scheduler.plan, list[float]()
    assert isinstance(cache, GroupedPrefixCache)
    groups = cache.groups

    def plan() -> Any:
        step = plan_step()
        for row in step.rows:
            held = cache.pool.total - cache.pool.free - cache.evictable
            full = -(-(length if row.count > 1 else row.end) // 16)  # a prompt has all pages of this group from its beginning
            windows = -(-(min(row.end, window + row.count)) // 16)
            worst.append(held / (full * groups.full + windows * groups.windowed))
        return step

    engine.scheduler.plan = plan  # type: ignore[method-assign]
    prompt = [2 + 7 * place % 500 for place in range(length)]
    [(tokens, cached)] = engine.serve_counted([prompt], max_tokens=new)
    assert len(tokens) == new and cached == 0 and len(worst) >= length // chunk + new - 1
    assert max(worst) <= 1.1, f"{max(worst)} times what the windows need"
    assert engine.scheduler.load().preemptions == 0
    [(again, cached)] = engine.serve_counted([prompt], max_tokens=new)
    assert again == tokens and cached > length - 20, "and the next turn continues where this one ended"


def test_memory_has_room_for_more_streams(tmp_path: Path) -> None:
    """Streams of 4,000 tokens in 64 MiB, with groups and without."""
    save_model("gemma3", tmp_path, sliding_window=WINDOW)
    loads = load_model(str(tmp_path)), load_model(str(tmp_path), max_model_len=WINDOW)
    grouped, whole = (RunnerBuilder(loaded=loaded, page_size=16, kv_cache_bytes=64 << 20).build() for loaded in loads)
    assert grouped.backend.pages == 4 * whole.backend.pages and whole.backend.spec.num_groups == 1
    streams = grouped.backend.pages // (250 + 3 * 3), whole.backend.pages // 250
    assert streams[0] > 3.8 * streams[1]
