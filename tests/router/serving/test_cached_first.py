"""Prompts with a cached context go first while requests are refused, and only then; the others do not starve."""

import heapq
import random
from copy import deepcopy
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
from fairlead_router.serving.slo_gate import ClassTerms, SloGate, estimate_worker, used_share

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
        verdict = admission.decide(request, [WorkerEstimate(wait, RATE, tokens)], 0, now)
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
    monkeypatch.setattr(CachedFirst, "next_turn", lambda *_: 0.0)
    assert with_rule > 0.85 and served() < with_rule - 0.05, "without the rule new prompts take their place"


def test_below_capacity_and_among_equals_nothing_is_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(turns: float, begins: float) -> list[int]:
        return [kind.admitted for kind in play(30.0, turns, begins, False, BoundedAdmission())]

    cases = ((0.4 * RATE / TURN, 0.4 * RATE / PROMPT), (0.0, 3 * RATE / PROMPT), (3 * RATE / TURN, 0.0))
    found = [outcome(*case) for case in cases]
    monkeypatch.setattr(CachedFirst, "next_turn", lambda *_: 0.0)
    assert found == [outcome(*case) for case in cases]


def test_a_new_conversation_that_returns_as_told_is_admitted_however_many_turns_arrive() -> None:
    """Turns alone need 1.5 times the capacity. A new prompt goes once a thirty-second of the capacity has computed those before it."""
    continuing, new = play(200.0, 1.5 * RATE / TURN, 0.05, True, BoundedAdmission())
    seconds = 32 * PROMPT / RATE
    assert new.offered >= 5 and continuing.admitted < 0.75 * continuing.offered
    assert new.good == new.admitted and new.broken <= 1, "turns whose clients never return make promises less exact"
    assert max(new.waits) <= new.offered * seconds + 1
    assert new.admitted >= new.offered - 2, "only those whose turn comes after the end are missing"


def wait_after_one(rule: CachedFirst, priority: int, tokens: float, rate: float, now: float = 0.0) -> float:
    """Return how long the second of two equal prompts of 1,000 tokens waits for its turn."""
    rule = deepcopy(rule)
    rule.take_turn(priority, tokens, 1000, rate, now)
    return rule.next_turn(tokens, 1000, now)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=50), st.integers(0, 2))
def test_equal_shares_and_less_urgent_requests_outbid_no_one(prompts: list[tuple[int, int]], priority: int) -> None:
    rule = CachedFirst()
    rule.record_refusal(0.0)
    for tokens, cached in prompts:
        rule.record(priority + 1, tokens, tokens + cached, 0.0)
        rule.record(priority, 1000, 1000, 0.0)
    assert not wait_after_one(rule, priority, 1000, 1.0)
    assert not wait_after_one(rule, priority, 1, 1e-9), "nothing goes before a prompt that is cached"


def test_prompts_get_what_better_cached_demand_leaves_while_requests_are_refused() -> None:
    rule = CachedFirst()
    rule.record(0, 500 * HORIZON_SECONDS, 5000 * HORIZON_SECONDS, 0.0)
    assert not wait_after_one(rule, 0, 900, 600), "none was refused"
    rule.record_refusal(0.0)
    assert wait_after_one(rule, 0, 900, 600) == pytest.approx(9) and wait_after_one(rule, 0, 900, 900) == pytest.approx(900 / 400)
    assert wait_after_one(rule, 0, 900, 320) == pytest.approx(90), "a thirty-second is theirs in any case"
    assert wait_after_one(rule, 1, 900, 600) and not wait_after_one(rule, -1, 900, 600)
    rule.record(0, 0, 1000, 0.1)
    assert 0 < wait_after_one(rule, 0, 900, 600, 0.1) < 9, "older demand counts less"
    assert not wait_after_one(rule, 0, 900, 600, HORIZON_SECONDS + 0.1), "the last refusal is long ago"


def test_a_router_uses_the_capacity_in_proportion_to_its_requests() -> None:
    """Else each of several routers would compare its own demand with the capacity of all."""
    worker = Worker("a:1", monotonic)
    worker.load, worker.in_flight = WorkerLoad(running=30, waiting=10), 9
    assert used_share([worker]) == 0.25
    worker.in_flight = 60
    assert used_share([worker]) == used_share([Worker("b:1", monotonic)]) == 1, "the report is old, or there is none"
    rule = BoundedAdmission()
    busy, turn, begin = (
        WorkerEstimate(0.5, RATE, 400),
        BoundedRequest(0, "", 0, CHAT, 0.0, 2000, 1600),
        BoundedRequest(1, "", 0, CHAT, 0.0, 2000),
    )
    for number in range(20):  # half of what the worker computes in HORIZON_SECONDS
        rule.decide(replace(turn, key=("turn", number)), [busy], 0, 0.0)
    rule.decide(replace(turn, key="late"), [replace(busy, wait=9.0)], 0, 0.0)
    cold = replace(busy, uncached=2000)

    def second_waits(share: float) -> int:
        own = deepcopy(rule)
        assert not own.decide(begin, [cold], 0, 0.0, share=share).rejection, "the first one has its turn at once"
        return own.decide(replace(begin, key=2), [cold], 0, 0.0, share=share).retry_after

    assert second_waits(1.0) == 2 and second_waits(0.5) == 32, "the turns need all of a half, and half of the whole"


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30))
def test_a_turn_comes_once_a_thirty_second_of_the_capacity_has_computed_those_before(prompts: list[int]) -> None:
    rule = CachedFirst()
    rule.record(0, 2 * RATE * HORIZON_SECONDS, 20 * RATE * HORIZON_SECONDS, 10.0)
    rule.record_refusal(10.0)
    for tokens in prompts:
        rule.take_turn(0, tokens, tokens, RATE, 10.0)
    assert rule.next_turn(1, 1, 10.0) == pytest.approx(32 * sum(prompts) / RATE) and rule.next_turn(1, 1, 1e9) == 0


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


def test_what_other_routers_have_sent_counts_before_a_report_shows_it() -> None:
    """Else each of several routers would admit the capacity of all of them until the next report."""
    worker = Worker("a:1", monotonic)
    worker.load = WorkerLoad(prefill_rate=1000.0, running=1)
    sent = {"a:1": 0.0}
    table = cast(WorkerTable, type("Table", (), {"usable": lambda *_: [worker]})())
    gate = SloGate(table, Metrics(WorkerTable()), ServiceClasses([CHAT]), lambda request: {}, sent.__getitem__)

    def check(key: int) -> None:
        gate.check(ClassTerms(CHAT, RoutingRequest(100), 0, monotonic(), "", key), 0)

    check(0)
    sent["a:1"] = 1.5  # seconds, and its bound is 1.05
    with pytest.raises(ApiError, match="the first token is expected after 16"):
        check(1)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 2000), st.booleans()), min_size=1, max_size=80))
def test_whoever_returns_as_told_is_served_within_32_times_the_work_before_it(arrivals: list[tuple[float, int, bool]]) -> None:
    """Whatever arrives. Each: seconds since the one before, uncached tokens, and whether the rest of the prompt is cached."""
    admission, at, free_at, before = BoundedAdmission(), 0.0, 0.0, 0.0
    events: list[tuple[float, int, int, int, bool]] = []
    for number, (gap, tokens, is_cached) in enumerate(arrivals):
        at += gap
        events.append((at, number, tokens, 20 * tokens if is_cached else tokens, False))
    heapq.heapify(events)
    while events:
        now, number, tokens, prompt, is_back = heapq.heappop(events)
        wait = max(0.0, free_at - now)
        request = BoundedRequest(number, "", 0, CHAT, prompt_tokens=prompt, cached=prompt - tokens)
        verdict = admission.decide(request, [WorkerEstimate(wait, RATE, tokens)], 0, now)
        if verdict.rejection:
            assert not is_back, "it returned when it was told to"
            before += tokens
            assert verdict.retry_after <= wait + 32 * before / RATE + 1
            heapq.heappush(events, (now + verdict.retry_after, number, tokens, prompt, True))
        else:
            free_at = max(now, free_at) + tokens / RATE
            before += tokens


def test_a_short_prompt_waits_less_where_the_engine_takes_the_shortest_first() -> None:
    """Behind n prompts it goes once they got n times its work. By arrival, all of them go before."""
    worker = Worker("a:1", monotonic)
    worker.load = WorkerLoad(prefill_rate=1000.0, running=1, waiting=4, backlog_tokens=8000)
    now = worker.load_at

    def wait(uncached: int) -> float:
        return estimate_worker(worker, uncached, now).wait

    assert wait(100) == wait(5000) == pytest.approx(8), "by arrival, or not known"
    worker.runs_shortest_first = True
    assert wait(100) == pytest.approx(2 + 0.4) and wait(5000) == pytest.approx(8)


def test_a_large_fleet_counts_the_workers_that_cache_the_prompt() -> None:
    """They are rarely among the soonest, and the others have to compute all of it."""
    table, held = WorkerTable(), {"10.0.0.39:1": 900}
    table.set_addresses([f"10.0.0.{number}:1" for number in range(40)])
    for worker in table:
        worker.ready = True
        worker.load = WorkerLoad(prefill_rate=1000.0, running=1, backlog_tokens=400 if worker.address in held else 100)
    gate = SloGate(table, Metrics(WorkerTable()), ServiceClasses([CHAT]), lambda request: held)
    terms = ClassTerms(CHAT, RoutingRequest(1000, (1,)), 0, monotonic(), "", 0)
    considered = [worker.address for worker in gate._considered(terms, table.usable(), held)]
    assert len(considered) == 13 and "10.0.0.39:1" in considered


def test_priorities_that_a_client_invents_do_not_make_the_decisions_longer() -> None:
    demand = CachedFirst()
    for priority in range(5000):
        demand.record(priority, 1000, 1000, now=0.0)
    assert len(demand._tokens) <= 1001
    demand.record_refusal(0.0)
    assert not wait_after_one(demand, 10**9, 1000, 1.0), "prompts of one level do not go before each other"
    demand.record(5000, 0.5, 1000, now=0.0)
    demand.record(5001, 300.0, 1000, now=0.0)
    assert wait_after_one(demand, 10**9, 1000, 1.0), "urgent ones that are cached go first"
