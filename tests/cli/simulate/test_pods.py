"""Modelled pods: order, protection, promises, reports. The queue is the engine's, so its own tests hold here too."""

import random
from array import array
from typing import get_args

import pytest

from fairlead.simulate.pods import Engine, Pod, PodModel
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request

MODEL = PodModel(rate=512.0, cache_blocks=8, step_seconds=0.0, report_seconds=0.0)  # a second per block
ENGINES: tuple[Engine, ...] = get_args(Engine)


def prompt(*blocks: int, at: float = 0.0) -> Request:
    return Request(at, len(blocks) * BLOCK_TOKENS, 1, array("Q", blocks))


def served(pod: Pod, arrivals: list[Request]) -> list[int]:
    """Run the pod until it is idle. Return the positions of the requests in the order of their prefills."""
    order, running, left = [], None, list(arrivals)
    while left or running:
        if running is None or (left and left[0].at < running.ends_at):
            begun = pod.add(left[0], left[0].at)[1]
            left.pop(0)
        else:
            begun, running = pod.finish(running.ends_at), None
        if begun is not None:
            running = begun
            order.append(begun.number)
    return order


def test_only_uncached_tokens_are_computed_and_always_the_last_block() -> None:
    pod = Pod(MODEL, phase=0.0)
    _, first = pod.add(prompt(1, 2), 0.0)
    assert first is not None and (first.cached, first.computed, first.ends_at) == (0, 1024, 2.0)
    assert pod.add(prompt(1, 2, 3), 0.5)[1] is None
    behind = pod.finish(2.0)
    assert behind is not None and (behind.cached, behind.computed, behind.ends_at) == (1024, 512, 3.0)
    assert pod.finish(3.0) is None
    again = pod.add(prompt(1, 2), 9.0)[1]
    assert again is not None and (again.cached, again.computed) == (512, 512)


def test_fairlead_admits_short_prompts_first_and_peers_by_arrival() -> None:
    arrivals = [prompt(1, 2), prompt(3, 4, 5, 6, at=0.1), prompt(*range(10, 15), at=0.2), prompt(20, at=0.3), prompt(1, 2, 30, at=0.4)]
    assert served(Pod(MODEL, 0.0), arrivals) == [0, 1, 3, 4, 2], "4 is short once 1 and 2 are cached"
    assert served(Pod(MODEL, 0.0, "fcfs"), arrivals) == [0, 1, 2, 3, 4]


def test_a_long_prompt_waits_for_the_work_that_was_ahead_of_it_at_most_twice() -> None:
    """At full load, with a short prompt every second. The bound is the one of `ShortestOrder`."""
    arrivals = [prompt(1, 2, 3, 4, 5, 6), prompt(*range(10, 16), at=0.1)]
    arrivals += [prompt(100 + number, at=0.2 + number) for number in range(40)]
    assert served(Pod(MODEL, 0.0), arrivals).index(1) <= 8


def test_the_prefix_of_a_waiting_request_is_not_evicted() -> None:
    # The last request waits for three others, which need pages. LRU evicts block 3, which only it will use.
    arrivals = [prompt(1, 2, 3), prompt(10, 11, at=3.1), prompt(12, at=3.2), prompt(20, 21, 22, at=3.3), prompt(1, 2, 3, 4, 5, at=3.4)]
    computed = {}
    for engine in ENGINES:
        pod = Pod(MODEL, 0.0, engine)
        assert served(pod, arrivals) == [0, 1, 2, 3, 4]
        computed[engine] = pod.computed // BLOCK_TOKENS
    assert computed == {"fairlead": 11, "fcfs": 12}


@pytest.mark.parametrize("engine", ENGINES)
def test_fairlead_shows_a_prompt_to_the_index_while_it_waits(engine: Engine) -> None:
    pod = Pod(MODEL, 0.0, engine)
    pod.add(prompt(1, 2), 0.0)
    pod.add(prompt(5, 6, 7), 0.1)
    shown = array("Q", b"".join(event.hashes for event in pod.drain_events() if event.kind == "stored"))
    assert set(shown) == ({1, 5, 6} if engine == "fairlead" else set()), "the last block of a prompt is never reused, so it is not promised"


def test_the_index_is_what_pods_cache_and_promise() -> None:
    draw, pod, shown, running, now = random.Random(3), Pod(PodModel(cache_blocks=30), 0.0), set[int](), None, 0.0
    for number in range(400):
        talk = draw.randrange(6)
        begun = pod.add(prompt(*(talk * 100 + level for level in range(1, draw.randrange(3, 30)))), now)[1]
        running = begun or running
        while running is not None and number % 5 == 4:
            now = running.ends_at
            running = pod.finish(now)
        for event in pod.drain_events():
            hashes = array("Q", event.hashes)
            assert (event.kind == "removed") == shown.issuperset(hashes)
            shown = shown | set(hashes) if event.kind == "stored" else shown - set(hashes)
        assert shown == set(pod.cache.block_hashes())
        assert all(block % 100 == 1 or block - 1 in shown for block in shown), "prefix-closed"
        now += 0.01


def test_reports_have_waiting_requests_and_uncached_tokens_and_are_as_old_as_the_period() -> None:
    pod = Pod(PodModel(rate=512.0, cache_blocks=8, step_seconds=0.0, report_seconds=2.0), phase=0.0)
    pod.add(prompt(1, 2, 3), 2.5)
    assert pod.load(3.9)[0] == 2.0 and pod.load(3.9)[1].backlog_tokens == 0
    pod.add(prompt(1, 2, 3, 4), 2.6)  # nothing is cached yet
    at, load = pod.load(4.1)
    assert (at, load.waiting, load.backlog_tokens) == (4.0, 1, 768 + 2048)
    pod.finish(5.5)
    at, load = pod.load(6.2)
    assert (at, load.waiting, load.backlog_tokens) == (6.0, 0, 256)


def test_a_prompt_longer_than_the_cache_is_served() -> None:
    assert served(Pod(MODEL, 0.0), [prompt(*range(1, 20)), prompt(*range(1, 25), at=1.0)]) == [0, 1]
