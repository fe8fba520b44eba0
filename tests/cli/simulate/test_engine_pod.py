"""The modelled worker that runs the engine's scheduler: what its steps contain, and when their tokens come."""

from array import array
from dataclasses import replace

import pytest

from fairlead.simulate.engine_pod import EngineModel, EnginePod
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.workloads.request import Request
from fairlead_worker.scheduler.config import SchedulerConfig

PAGE = 16
MODEL = EngineModel(SchedulerConfig(max_model_len=4096, chunked_prefill_size=64), 64, PAGE, (0.0, 0.01, 0.0, 0.0, 0.1), 0.0)
"""A step takes 0.1 s and 0.01 s for each prompt token."""


def prompt(*blocks: int, at: float = 0.0, output: int = 1, tokens: int | None = None) -> Request:
    return Request(at, len(blocks) * PAGE if tokens is None else tokens, output, array("Q", blocks))


def first_tokens(pod: EnginePod, arrivals: list[Request]) -> list[tuple[int, float, int]]:
    """Run the pod until it is idle. Return number, time and cached tokens of each first token."""
    found, left = [], list(arrivals)
    while left or not pod.is_idle:
        now = pod.next_event()
        if left and left[0].at < now:
            pod.add(left[0], left.pop(0).at)
        else:
            found += [(progress.number, round(now, 6), progress.cached) for progress in pod.advance(now) if not progress.is_last]
    return found


def test_requests_that_arrive_in_a_step_wait_for_its_end_and_share_the_next() -> None:
    arrivals = [prompt(1, 2), prompt(3, at=0.1), prompt(4, at=0.2)]
    assert first_tokens(EnginePod(MODEL, 0.0), arrivals) == [(0, 0.42, 0), (1, 0.84, 0), (2, 0.84, 0)]


def test_a_long_prompt_takes_a_step_for_each_chunk() -> None:
    assert first_tokens(EnginePod(MODEL, 0.0), [prompt(*range(1, 9))]) == [(0, 1.48, 0)], "two chunks"


def test_a_cached_prefix_is_not_computed_and_the_last_page_always() -> None:
    pod = EnginePod(MODEL, 0.0)
    found = first_tokens(pod, [prompt(1, 2, 3), prompt(1, 2, 3, 4, at=2.0), prompt(1, 2, 3, at=4.0)])
    assert [cached for _, _, cached in found] == [0, 48, 32] and pod.computed == 48 + 16 + 16


def test_the_index_and_routers_learn_of_a_step_when_it_ends() -> None:
    pod = EnginePod(MODEL, 0.0)
    pod.add(prompt(1, 2, output=5), 1.0)
    assert pod.drain_events() == () and pod.load_at(1.2).running == 0
    pod.advance(pod.next_event())
    shown = array("Q", b"".join(event.hashes for event in pod.drain_events()))
    assert set(shown) >= {1} and pod.load_at(1.5).running == 1


def test_a_request_that_can_never_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="refuses"):
        EnginePod(MODEL, 0.0).add(prompt(*range(1, 80)), 0.0)


def test_a_replay_answers_every_request() -> None:
    requests = [prompt(number % 5 + 1, 100 + number, at=0.2 * number, output=3) for number in range(50)]
    outcome = replay("fairlead", requests, Scenario(2, MODEL))
    assert len(outcome.served) == 50 and 0 < outcome.hit_rate < 0.5
    assert sum(outcome.computed) == round((1 - outcome.hit_rate) * 50 * 2 * PAGE)


def test_steps_in_a_row_have_time_between_them() -> None:
    model = replace(MODEL, between_seconds=0.05)
    assert first_tokens(EnginePod(model, 0.0), [prompt(*range(1, 9)), prompt(9, at=3.0)]) == [(0, 1.53, 0), (1, 3.26, 0)]


def test_a_request_takes_time_from_the_step_in_flight_and_none_from_an_idle_worker() -> None:
    model = replace(MODEL, arrival_seconds=0.1)
    assert first_tokens(EnginePod(model, 0.0), [prompt(1, 2), prompt(3, at=0.1)]) == [(0, 0.52, 0), (1, 0.78, 0)]


def test_the_first_step_of_an_idle_worker_is_shorter() -> None:
    model = replace(MODEL, idle_credit=0.04)
    assert first_tokens(EnginePod(model, 0.0), [prompt(*range(1, 9)), prompt(9, at=3.0)]) == [(0, 1.44, 0), (1, 3.22, 0)]


@pytest.mark.parametrize(("routers", "cached"), [(1, [0, 48, 48]), (2, [0, 0, 0])])
def test_a_single_router_sends_a_prompt_where_its_prefix_is_computed(routers: int, cached: list[int]) -> None:
    """The index does not show a prompt before the end of its step. Several routers do not know each other's prompts."""
    model = replace(MODEL, config=SchedulerConfig(max_model_len=4096))
    requests = [prompt(1, 2, 3), prompt(1, 2, 3, 4, at=0.1), prompt(1, 2, 3, 4, 5, at=0.2)]
    outcome = replay("fairlead", requests, Scenario(3, model, routers=routers), seed=1)
    assert round(outcome.hit_rate * sum(each.prompt_tokens for each in requests)) == sum(cached)
