"""Prompts with a cached context go first while requests are refused, and only then; the others do not starve."""

import heapq
import random
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.serving.simulated_service import CHAT, RATE

from fairlead_index.worker_load import WorkerLoad
from fairlead_router.errors import ApiError
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.service_classes import ServiceClasses
from fairlead_router.serving.bounded_admission import RETURN_SHARE, BoundedAdmission, BoundedRequest, WorkerEstimate
from fairlead_router.serving.cached_first import HORIZON_SECONDS, CachedFirst
from fairlead_router.serving.slo_gate import ClassTerms, SloGate, used_share

PROMPT = 2000
TURN = 400
"""Uncached tokens of a prompt that continues a conversation."""


@dataclass
class Kind:
    """What became of the requests that continue a conversation, or of those that begin one."""

    offered: int = 0
    admitted: int = 0
    good: int = 0
    waits: list[int] = field(default_factory=list)
    """`Retry-After` of those with a booking."""
    broken: int = 0


def play(seconds: float, turns: float, begins: float, returns: bool, admission: BoundedAdmission) -> tuple[Kind, Kind]:
    """Serve `turns` continuing and `begins` new prompts a second at one worker. `returns`: rejected new ones come back as told."""
    rng, continuing, new = random.Random(0), Kind(), Kind()
    arrivals: list[tuple[float, str, int, bool]] = []
    for name, rate in (("turn", turns), ("new", begins)):
        at, number = 0.0, 0
        while rate and (at := at + rng.expovariate(rate)) < seconds:
            arrivals.append((at, name, number, False))
            number += 1
    heapq.heapify(arrivals)
    free_at = 0.0
    while arrivals and arrivals[0][0] < seconds:
        now, name, number, is_booked = heapq.heappop(arrivals)
        kind, tokens = (continuing, TURN) if name == "turn" else (new, PROMPT)
        kind.offered += not is_booked
        wait = max(0.0, free_at - now)
        request = BoundedRequest((name, number), "", 0, CHAT, prompt_tokens=PROMPT, cached=PROMPT - tokens)
        verdict = admission.decide(request, [WorkerEstimate(wait, RATE, tokens, is_free=not wait)], 0, now)
        if verdict.rejection:
            kind.broken += is_booked
            if returns and name == "new" and admission.ledger.find(request.key) is not None:
                kind.waits.append(verdict.retry_after)
                heapq.heappush(arrivals, (now + verdict.retry_after, name, number, True))
            continue
        free_at = now + wait + tokens / RATE
        kind.admitted += 1
        kind.good += wait <= RETURN_SHARE * CHAT.ttft_bound(0)
    return continuing, new


def test_beyond_capacity_prompts_with_a_cached_context_go_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of conversations need 1.2 times the capacity, and new prompts three times."""

    def served() -> float:
        """Return the share of the capacity that the turns get."""
        continuing, _ = play(60.0, 1.2 * RATE / TURN, 3 * RATE / PROMPT, False, BoundedAdmission())
        return continuing.good * TURN / (60.0 * RATE)

    with_rule = served()
    monkeypatch.setattr(CachedFirst, "is_outbid", lambda *_: False)
    assert with_rule > 0.85 and served() < with_rule - 0.05, "without the rule new prompts take their place"


def test_below_capacity_and_among_equals_nothing_is_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(turns: float, begins: float) -> list[int]:
        return [kind.admitted for kind in play(30.0, turns, begins, False, BoundedAdmission())]

    cases = ((0.4 * RATE / TURN, 0.4 * RATE / PROMPT), (0.0, 3 * RATE / PROMPT), (3 * RATE / TURN, 0.0))
    found = [outcome(*case) for case in cases]
    monkeypatch.setattr(CachedFirst, "is_outbid", lambda *_: False)
    assert found == [outcome(*case) for case in cases]


def test_a_new_conversation_that_returns_as_told_is_admitted_however_many_turns_arrive() -> None:
    """Turns alone need 1.5 times the capacity. A new prompt goes once a thirty-second of the capacity has computed those before it."""
    continuing, new = play(200.0, 1.5 * RATE / TURN, 0.05, True, BoundedAdmission())
    seconds = 32 * PROMPT / RATE
    assert new.offered >= 5 and continuing.admitted < 0.75 * continuing.offered
    assert new.good == new.admitted and new.broken <= 1, "turns whose clients never return make promises less exact"
    assert max(new.waits) <= new.offered * seconds + 1
    assert new.admitted >= new.offered - 2, "only those whose turn comes after the end are missing"


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=50), st.integers(0, 2))
def test_equal_shares_and_less_urgent_requests_outbid_no_one(prompts: list[tuple[int, int]], priority: int) -> None:
    rule = CachedFirst()
    rule.record_refusal(0.0)
    for tokens, cached in prompts:
        rule.record(priority + 1, tokens, tokens + cached, 0.0)
        rule.record(priority, 1000, 1000, 0.0)
    assert not rule.is_outbid(priority, 1000, 1000, 1.0, 0.0)
    assert not prompts or not rule.is_outbid(priority, 1, 1000, 1e-9, 0.0), "nothing goes before a prompt that is cached"


def test_a_prompt_is_outbid_while_better_cached_demand_fills_the_capacity_and_requests_are_refused() -> None:
    rule = CachedFirst()
    rule.record(0, 500 * HORIZON_SECONDS, 5000 * HORIZON_SECONDS, 0.0)
    assert not rule.is_outbid(0, 900, 1000, 500, 0.0), "none was refused"
    rule.record_refusal(0.0)
    assert rule.is_outbid(0, 900, 1000, 500, 0.0) and not rule.is_outbid(0, 900, 1000, 501, 0.0)
    assert rule.is_outbid(1, 900, 1000, 500, 0.0) and not rule.is_outbid(-1, 900, 1000, 500, 0.0)
    rule.record(0, 0, 1000, 0.1)
    assert not rule.is_outbid(0, 900, 1000, 500, 0.1), "older demand counts less"
    assert not rule.is_outbid(0, 900, 1000, 1, HORIZON_SECONDS + 0.1), "the last refusal is long ago"


def test_a_router_uses_the_capacity_in_proportion_to_its_requests() -> None:
    """Else each of several routers would compare its own demand with the capacity of all."""
    worker = Worker("a:1", monotonic)
    worker.load, worker.in_flight = WorkerLoad(running=30, waiting=10), 9
    assert used_share([worker]) == 0.25
    worker.in_flight = 60
    assert used_share([worker]) == used_share([Worker("b:1", monotonic)]) == 1, "the report is old, or there is none"
    rule = BoundedAdmission()
    busy, turn, begin = (
        WorkerEstimate(0.5, RATE, 10),
        BoundedRequest(0, "", 0, CHAT, 0.0, 2000, 1600),
        BoundedRequest(1, "", 0, CHAT, 0.0, 2000),
    )
    for number in range(20):  # half of what the worker computes in HORIZON_SECONDS
        rule.decide(replace(turn, key=("turn", number)), [busy], 0, 0.0)
    rule.decide(replace(turn, key="late"), [replace(busy, wait=9.0)], 0, 0.0)
    found = [
        rule.decide(replace(begin, key=number), [busy], 0, 0.0, share=share).rejection for number, share in enumerate((1, 1, 0.5, 0.5))
    ]
    assert found == ["", "", "", "outbid"], "the first outbid request has its turn at once"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_a_turn_comes_once_a_thirty_second_of_the_capacity_has_computed_those_before(prompts: list[int]) -> None:
    rule = CachedFirst()
    for tokens in prompts:
        rule.take_turn(tokens, RATE, 10.0)
    assert rule.next_turn(10.0) == pytest.approx(32 * sum(prompts) / RATE) and rule.next_turn(1e9) == 0


def test_the_router_says_why_it_refuses_and_counts_it() -> None:
    worker, warm = Worker("a:1", monotonic), (1, 2, 3)
    worker.load = WorkerLoad(prefill_rate=1000.0, running=1)
    worker.begin_prompt(300)
    metrics = Metrics(WorkerTable())
    table = cast(WorkerTable, type("Table", (), {"usable": lambda *_: [worker]})())

    def predict(request: RoutingRequest) -> dict[str, int]:
        return {worker.address: 900 if request.hashes == warm else 200}

    gate = SloGate(table, metrics, ServiceClasses([CHAT]), predict)

    def check(key: int, hashes: Any) -> None:
        gate.check(ClassTerms(CHAT, RoutingRequest(1000, hashes), 0, monotonic(), "", key), 0)

    def count(reason: str) -> float | None:
        return metrics.registry.get_sample_value("fairlead_router_refused_total", {"reason": reason})

    for number in range(60):
        check(number, warm)
    check(100, ())  # nothing was refused yet
    worker.begin_prompt(700)
    with pytest.raises(ApiError, match="the first token is expected after"):
        check(101, warm)
    worker.end_prompt(700)
    check(102, ())  # the first one has its turn at once
    with pytest.raises(ApiError) as caught:
        check(103, ())
    assert caught.value.status == 429 and str(caught.value) == (
        "Class chat: 200 of 1000 prompt tokens are cached. The service is overloaded, and prompts of which a larger share is cached "
        "go first. Try again in 26 s."  # 800 tokens, at a thirty-second of 1,000 a second
    )
    assert (count("cached_first"), count("slo")) == (1, 1)
    check(104, warm)


def test_priorities_that_a_client_invents_do_not_make_the_decisions_longer() -> None:
    demand = CachedFirst()
    for priority in range(5000):
        demand.record(priority, 1000, 1000, now=0.0)
    assert len(demand._tokens) <= 1001
    demand.record_refusal(0.0)
    assert demand.is_outbid(10**9, 1000, 1000, 1.0, 0.0) is False, "prompts of one level do not go before each other"
    demand.record(5000, 0.5, 1000, now=0.0)
    demand.record(5001, 300.0, 1000, now=0.0)
    assert demand.is_outbid(10**9, 1000, 1000, 1.0, 0.0), "urgent ones that are cached go first"
