"""The replay: the router's queue, service classes and goodput."""

import math
import random
from array import array

import pytest

from fairlead.simulate.catalog import load
from fairlead.simulate.fleet import Fleet, InflightRequest
from fairlead.simulate.ours import Fairlead
from fairlead.simulate.pods import Pod, PodModel
from fairlead.simulate.replay import Scenario, replay
from fairlead.simulate.router import Router
from fairlead.simulate.service_classes import Objective, ServiceClass, assign_classes
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request

MODEL = PodModel(start_seconds=5.0)


def arrivals(count: int, per_second: float, blocks: int = 8, output: int = 50) -> list[Request]:
    """Requests with unique prompts of 4,096 tokens: a pod computes two of them per second."""
    draw = random.Random(0)
    return [
        Request(number / per_second, blocks * BLOCK_TOKENS, output, array("Q", (draw.getrandbits(64) for _ in range(blocks))))
        for number in range(count)
    ]


def test_a_router_sends_a_pod_a_second_of_prompts_or_four_and_queues_the_others() -> None:
    fleet, sent = Fleet(lambda now: Pod(MODEL, 0.0), 2, 2, BLOCK_TOKENS), list[InflightRequest]()

    def send(flight: InflightRequest) -> None:
        sent.append(flight)
        fleet.add_request(flight)

    draw = random.Random(0)
    router = Router(0, fleet, Fairlead(fleet, fleet.inflight, draw), fleet.inflight, True, (), send)
    for number, request in enumerate(arrivals(100, math.inf)):
        router.enter(request, number, Objective(service_class=int(number < 90)))
    assert [len(waiting) for waiting in fleet.inflight.waiting] == [4, 4] and len(router.queue) == 92
    fleet.record_first_token(sent[0])
    router.release(sent[0])
    router.admit_waiting()
    assert len(router.queue) == 91 and sent[-1].position == 90, "the first of the urgent class"


def test_bounds_grow_with_the_tokens_that_no_cache_has() -> None:
    (first,) = arrivals(1, 1.0)
    classes = [ServiceClass("all", 1.0, 2.0, 0.001, 0.1)]
    assert [one.ttft for one in assign_classes([first, first], classes, 0)] == pytest.approx([2 + 4.096, 2 + 0.001])
    shares = [ServiceClass("chat", 3.0), ServiceClass("batch", 1.0)]
    objectives = assign_classes(arrivals(2000, 1.0), shares, 0)
    assert sum(one.service_class for one in objectives) == pytest.approx(500, rel=0.15)
    assert objectives == assign_classes(arrivals(2000, 1.0), shares, 0)


def test_goodput_counts_answers_within_both_bounds() -> None:
    requests = arrivals(40, 2.0)
    for one, share in (
        (ServiceClass("all", 1.0, 5.0), 1.0),
        (ServiceClass("all", 1.0, 0.0, 0.0), 0.0),
        (ServiceClass("all", itl=0.001), 0.0),
    ):
        assert replay("fairlead", requests, Scenario(4, MODEL, classes=[one])).figures()["good_share"] == share


def test_beyond_capacity_routers_that_know_the_bounds_refuse_early() -> None:
    requests = arrivals(400, 8.0)  # twice what two pods can do
    classes = [ServiceClass("chat", 0.3), ServiceClass("batch", 0.7, 20.0)]
    blind, bounded, arrival = (
        replay(policy, requests, Scenario(2, MODEL, classes=classes, has_bounds=has_bounds)).figures()
        for policy, has_bounds in (("fairlead", False), ("fairlead", True), ("fairlead-fcfs", True))
    )
    assert blind["lost"] == arrival["lost"] == 0 < bounded["lost"]
    assert bounded["goodput"] > 1.3 * arrival["goodput"] and bounded["goodput"] > 1.1 * blind["goodput"]
    assert bounded["goodput"] == pytest.approx(bounded["goodput_chat"] + bounded["goodput_batch"])


def test_beyond_capacity_agents_keep_their_goodput() -> None:
    def goodput(speed: float) -> float:
        (requests,) = load("agents", count=None, speed=speed, pods=4, model=PodModel(), seeds=[0], seconds=60.0)
        return replay("fairlead", requests, Scenario(4, PodModel(), has_bounds=True)).figures()["goodput"]

    assert goodput(5.0) > 0.95 * goodput(1.7)
