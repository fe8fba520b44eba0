"""The score: what a worker can reuse, the price of a choice, ties, and absurd records."""

import math
import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fairlead_index.score import STREAM_WEIGHT, ScoredWorker, congestion, rank_candidates
from fairlead_index.worker_load import WorkerLoad


def worker_of(address: str, block_tokens: int = 16, depth: int = 0, reserved: float = 0.0, **load: Any) -> ScoredWorker:
    return ScoredWorker(address, block_tokens, WorkerLoad(**load), reserved_tokens=reserved, depth=depth)


@pytest.mark.parametrize("number", [float("inf"), 1e300, 0.0])
def test_absurd_numbers_of_a_worker_rank_it_and_leave_the_others(number: float) -> None:
    """A worker may write any finite record of its service. A list of workers must not fail, and NaN must not decide."""
    absurd = dict.fromkeys(("waiting", "backlog_tokens", "step_seconds", "arrival_rate", "running"), number)
    forged = worker_of("a:1", prefill_rate=number or 1e-3, **absurd)
    starts = rank_candidates([forged, worker_of("b:1", 16, prefill_rate=8000.0)], bytes(8), 4000, bytes(8), 2)
    assert {start.address for start in starts} == {"a:1", "b:1"}
    assert not any(math.isnan(start.score) for start in starts if start.address == "b:1")


@pytest.mark.parametrize("forged", [0, 1])
def test_a_worker_of_a_forged_rate_comes_last(forged: int) -> None:
    """Its work is infinite: without congestion the price must not become NaN, which compares as neither later nor sooner."""
    workers = [worker_of(f"{name}:1", 16, prefill_rate=1e-320 if place == forged else 8000.0) for place, name in enumerate("ab")]
    starts = rank_candidates(workers, b"", 4000, bytes(8), 2)
    assert [start.address for start in starts] == [workers[1 - forged].address, workers[forged].address]


def test_equal_workers_have_one_order_for_all_routers() -> None:
    """So routers that do not know of each other's latest choices send a prefix that no worker holds to the same one."""
    workers = [worker_of(f"10.0.0.{n}:8000", 16) for n in range(8)]
    first = {seed: rank_candidates(workers, bytes([seed]) * 64, 128, os.urandom(8), 1)[0].address for seed in range(20)}
    assert first == {seed: rank_candidates(workers[::-1], bytes([seed]) * 64, 128, os.urandom(8), 1)[0].address for seed in range(20)}
    assert len(set(first.values())) >= 5, "different prefixes go to different workers"
    short = Counter(rank_candidates(workers, b"", 3, os.urandom(8), 1)[0].address for _ in range(200))
    assert len(short) == 8, "prompts shorter than a block are spread"


def test_a_worker_without_room_is_the_last_resort() -> None:
    full = worker_of("full:1", 16, pages_free=1, pages_total=100, page_size=16)
    busy = worker_of("busy:1", 16, backlog_tokens=50_000, pages_free=90, pages_total=100, page_size=16)
    assert [start.address for start in rank_candidates([full, busy], b"", 256, bytes(8), 2)] == ["busy:1", "full:1"]


@pytest.mark.parametrize(("prompt", "page", "cached"), [(48, 16, 32), (49, 16, 48), (48, 0, 47), (48, 4, 44), (1, 16, 0)])
def test_the_predicted_tokens_are_what_a_worker_can_reuse(prompt: int, page: int, cached: int) -> None:
    """Whole pages and never the last token: otherwise the prediction for a prompt of whole blocks is always wrong."""
    worker = worker_of(address="a:1", block_tokens=16, depth=3, page_size=page)
    [start] = rank_candidates([worker], bytes(24), prompt, bytes(8), 1)
    assert start.cached == cached


@pytest.mark.parametrize(
    ("backlogs", "waiting", "scores"),
    [
        ((2000, 0), 0, {"a": (0.28, 0.28), "b": (0.27, 0.33)}),
        ((8000, 0), 0, {"b": (0.27, 0.33), "a": (1.03, 1.03)}),
        ((24_000, 16_000), 10, {"a": (3.03, 3.03), "b": (2.27, 4.91)}),
    ],
)
def test_the_example_of_the_page(backlogs: tuple[int, int], waiting: int, scores: dict[str, tuple[float, float]]) -> None:
    """docs/design/prefix-index/score.md"""
    workers = [
        worker_of(address, 64, depth=depth, waiting=waiting, backlog_tokens=backlog, prefill_rate=8000, step_seconds=0.02)
        for address, depth, backlog in zip("ab", (30, 0), backlogs, strict=True)
    ]
    ranked = rank_candidates(workers, bytes(8 * 31), 2000, bytes(8), 2)
    assert [(start.address, (round(start.seconds, 2), round(start.score, 2))) for start in ranked] == list(scores.items())


def test_a_miss_costs_the_requests_that_arrive_while_it_is_computed() -> None:
    """One worker holds the prompt behind 1.6 s of work. The other is idle and computes it in a second, while 8 requests arrive there."""
    holder = worker_of("a:1", 16, depth=500, backlog_tokens=12_800, prefill_rate=8000.0)
    other = worker_of("b:1", 16, prefill_rate=8000.0)
    assert rank_candidates([holder, other], bytes(8 * 500), 8000, bytes(8), 1)[0].address == "b:1"
    busy = worker_of("b:1", prefill_rate=8000.0, arrival_rate=8.0)
    best, second = rank_candidates([holder, busy], bytes(8 * 500), 8000, bytes(8), 2)
    extra = 1.0 - 16 / 8000  # the holder computes a block
    assert best.address == "a:1" and second.terms()["price"] == pytest.approx(extra * 4.25)


WORKERS = st.lists(
    st.builds(
        worker_of,
        address=st.uuids().map(str),
        block_tokens=st.just(64),
        depth=st.integers(0, 40),
        reserved=st.floats(0, 1e5),
        waiting=st.integers(0, 100),
        backlog_tokens=st.floats(0, 1e5),
        prefill_rate=st.floats(100, 1e5),
        step_seconds=st.floats(0, 0.1),
        arrival_rate=st.floats(0, 100),
        running=st.integers(0, 256),
    ),
    min_size=1,
    max_size=8,
)


@given(workers=WORKERS, prompt=st.integers(1, 4000))
def test_prompts_without_reuse_go_where_they_start_soonest(workers: list[ScoredWorker], prompt: int) -> None:
    """Otherwise long ones go where few requests wait, however long those take: their p99 was 1.1 to 1.3 of the best peer's."""
    alike = [replace(worker, depth=0, load=structs.replace(worker.load, prefill_rate=8000.0, running=0)) for worker in workers]
    starts = rank_candidates(alike, bytes(8 * 63), prompt, bytes(8), len(alike))
    assert [start.score for start in starts] == [start.seconds for start in starts]
    assert starts[0].seconds == min(start.seconds for start in starts)


@given(workers=WORKERS, prompt=st.integers(1, 4000))
def test_the_price_is_at_most_the_delay_by_what_another_worker_saves_and_that_of_streams(workers: list[ScoredWorker], prompt: int) -> None:
    starts = rank_candidates(workers, bytes(8 * 63), prompt, bytes(8), len(workers))
    least, mean, by_address = min(start.work for start in starts), congestion(workers), {worker.address: worker for worker in workers}
    for start in starts:
        worker = by_address[start.address]
        delayed = (worker.load.waiting + 1 + mean) / 2 + worker.load.arrival_rate
        assert 0 <= start.price <= (start.work - least) * delayed + STREAM_WEIGHT * start.work * worker.load.running + 1e-9


@given(worker=WORKERS.map(lambda workers: workers[0]), more=st.integers(1, 200), prompt=st.integers(1, 4000))
def test_more_running_streams_never_make_a_worker_better(worker: ScoredWorker, more: int, prompt: int) -> None:
    busier = replace(worker, address="busier", load=structs.replace(worker.load, running=worker.load.running + more))
    starts = {start.address: start.score for start in rank_candidates([worker, busier], bytes(8 * 63), prompt, bytes(8), 2)}
    assert starts["busier"] >= starts[worker.address]


def test_of_workers_that_start_a_prompt_equally_soon_the_one_with_fewer_streams_is_chosen() -> None:
    """Each second of its prefill delays all streams there by about a second."""
    calm, busy = worker_of("calm:1", 64, prefill_rate=8000.0, running=10), worker_of("busy:1", 64, prefill_rate=8000.0, running=100)
    for workers in ([calm, busy], [busy, calm]):
        best, other = rank_candidates(workers, bytes(8 * 63), 4000, bytes(8), 2)
        assert best.address == "calm:1" and other.price - best.price == pytest.approx(STREAM_WEIGHT * 90 * 0.5)
