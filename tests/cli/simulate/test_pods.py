"""Modelled pods: order, protection, promises, reports. The queue is the engine's, so its own tests hold here too."""

import random
from array import array
from typing import get_args

import pytest

from fairlead.simulate.pods import Pod, PodModel
from fairlead.simulate.queues import Engine
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request

MODEL = PodModel(rate=512.0, cache_blocks=8, step_seconds=0.001, context_seconds=0.0, report_seconds=0.0)  # a second per block
ENGINES: tuple[Engine, ...] = get_args(Engine)


def prompt(*blocks: int, at: float = 0.0, output: int = 0) -> Request:
    return Request(at, len(blocks) * BLOCK_TOKENS, output, array("Q", blocks))


def served(pod: Pod, arrivals: list[Request]) -> list[tuple[int, float, int]]:
    """Run the pod until it is idle. Return number, time and cached tokens of each first token."""
    order, left = [], list(arrivals)
    while left or not pod.is_idle:
        now = pod.next_event()
        if left and left[0].at < now:
            pod.add(left[0], left[0].at)
            left.pop(0)
        else:
            order += [(progress.number, now, progress.cached) for progress in pod.advance(now) if not progress.is_last]
    return order


def order_of(pod: Pod, arrivals: list[Request]) -> list[int]:
    return [number for number, _, _ in served(pod, arrivals)]


def test_only_uncached_tokens_are_computed_and_always_the_last_block() -> None:
    pod = Pod(MODEL, phase=0.0)
    first_tokens = served(pod, [prompt(1, 2), prompt(1, 2, 3, at=0.5), prompt(1, 2, at=9.0)])
    assert [(number, cached) for number, _, cached in first_tokens] == [(0, 0), (1, 1024), (2, 512)]
    assert [at for _, at, _ in first_tokens] == pytest.approx([2.0, 3.0, 10.0])
    assert pod.computed == 1024 + 512 + 512


def test_prefill_and_decodes_slow_each_other_down() -> None:
    model = PodModel(rate=512.0, cache_blocks=64, step_seconds=0.1, context_seconds=1e-4, chunk_tokens=256, report_seconds=0.0)
    own = 1e-4 * (512 + 101 / 2)  # seconds that the context of the decode adds to each step
    alone, beside = Pod(model, 0.0), Pod(model, 0.0)
    for pod in (alone, beside):
        pod.add(prompt(1, output=101), 0.0)
        assert not pod.advance(pod.next_event())[0].is_last
    assert alone.next_event() == pytest.approx(1.0 + 100 * (0.1 + own))
    beside.add(prompt(2, 3, 4, 5), 1.0)
    second = beside.next_event()
    assert second == pytest.approx(1.0 + 8 * (0.5 + own)), "eight chunks"
    assert {progress.number for progress in beside.advance(second)} == {1}
    while not beside.is_idle:
        end = beside.next_event()
        beside.advance(end)
    assert end == pytest.approx(second + 92 * (0.1 + own)), "it got a token in each of the eight steps"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_request_waits_for_the_pages_of_running_answers(engine: Engine) -> None:
    first, second = served(Pod(MODEL, 0.0, engine), [prompt(1, 2, output=2048), prompt(5, 6, 7, at=0.1)])
    assert second[1] == pytest.approx(first[1] + 2047 * 0.001 + 3.0), "six of the eight pages are taken until the last token"


def test_fairlead_admits_cached_prompts_first_and_peers_by_arrival() -> None:
    arrivals = [prompt(1, 2), prompt(3, 4, 5, 6, at=0.1), prompt(*range(10, 15), at=0.2), prompt(20, at=0.3), prompt(1, 2, 30, at=0.4)]
    assert order_of(Pod(MODEL, 0.0), arrivals) == [0, 4, 1, 3, 2], "2 does not fit beside 1"
    assert order_of(Pod(MODEL, 0.0, "fcfs"), arrivals) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("engine", ENGINES)
def test_fairlead_shows_a_prompt_to_the_index_while_it_waits(engine: Engine) -> None:
    pod = Pod(MODEL, 0.0, engine)
    pod.add(prompt(1, 2), 0.0)
    pod.add(prompt(5, 6, 7), 0.1)
    shown = array("Q", b"".join(event.hashes for event in pod.drain_events() if event.kind == "stored"))
    assert set(shown) == (set() if engine == "fcfs" else {1, 5, 6}), "the last block of a prompt is never reused, so it is not promised"


def test_the_index_is_what_pods_cache_and_promise() -> None:
    draw, pod, shown, now = random.Random(3), Pod(PodModel(cache_blocks=30), 0.0), set[int](), 0.0
    for number in range(400):
        talk = draw.randrange(6)
        pod.add(prompt(*(talk * 100 + level for level in range(1, draw.randrange(3, 30))), output=20), now)
        while number % 5 == 4 and not pod.is_idle:
            now = pod.next_event()
            pod.advance(now)
        for event in pod.drain_events():
            hashes = array("Q", event.hashes)
            assert (event.kind == "removed") == shown.issuperset(hashes)
            shown = shown | set(hashes) if event.kind == "stored" else shown - set(hashes)
        assert shown == set(pod.cache.block_hashes())
        assert all(block % 100 == 1 or block - 1 in shown for block in shown), "prefix-closed"


def test_the_reported_step_is_the_mean_of_recent_ones_as_in_the_engine() -> None:
    model = PodModel(rate=512.0, cache_blocks=64, step_seconds=0.1, context_seconds=0.0, chunk_tokens=256, report_seconds=0.0)
    pod = Pod(model, 0.0)
    pod.add(prompt(1, output=1001), 0.0)
    pod.advance(pod.next_event())
    pod.add(prompt(2, 3, output=1001), 1.0)  # four steps of 0.5 s
    pod.advance(pod.next_event())
    shortly_after = pod.load_at(3.0 + 1e-9)
    assert shortly_after.running == 2 and shortly_after.step_seconds == pytest.approx(0.1 + 0.4 * (1 - 0.9**4))
    pod.add(prompt(4), 10.0)
    assert pod.load_at(10.0 + 1e-9).step_seconds == pytest.approx(0.1, abs=1e-3), "70 steps later"


def test_reports_have_waiting_requests_and_uncached_tokens_and_are_as_old_as_the_period() -> None:
    model = PodModel(rate=512.0, cache_blocks=8, step_seconds=0.001, context_seconds=0.0, report_seconds=2.0)
    pod = Pod(model, phase=0.0)
    pod.add(prompt(1, 2, 3), 2.5)
    assert pod.load(3.9)[0] == 2.0 and pod.load(3.9)[1].backlog_tokens == 0
    pod.add(prompt(1, 2, 3, 4), 2.6)  # nothing is cached yet
    at, load = pod.load(4.1)
    assert (at, load.running, load.waiting, load.backlog_tokens, load.pages_free) == (4.0, 1, 1, 768 + 2048, 5)
    pod.advance(pod.next_event())
    at, load = pod.load(6.2)
    assert (at, load.waiting, load.backlog_tokens) == (6.0, 0, 256)


def test_a_prompt_longer_than_the_cache_is_served() -> None:
    assert order_of(Pod(MODEL, 0.0), [prompt(*range(1, 20)), prompt(*range(1, 25), at=1.0, output=9999)]) == [0, 1]
