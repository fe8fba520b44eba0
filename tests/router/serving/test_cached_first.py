"""Prompts with a cached context go first while requests are refused, and only then; the others do not starve."""

import heapq
import math
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
from fairlead_router.serving.bounded_admission import RETURN_SHARE, BoundedAdmission, BoundedRequest, Verdict, WorkerEstimate
from fairlead_router.serving.cached_first import HORIZON_SECONDS, CachedFirst
from fairlead_router.serving.slo_gate import MOST_SENT_SECONDS, ClassTerms, SloGate, estimate_worker, used_share

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
    admitted_at: list[float] = field(default_factory=list)


def play(
    seconds: float,
    turns: float,
    begins: float,
    returns: float,
    admission: BoundedAdmission,
    prompt: int = PROMPT,
    turns_end: float = math.inf,
) -> tuple[Kind, Kind]:
    """Serve `turns` continuing and `begins` new prompts a second at one worker. `returns`: share of rejected new ones that come back."""
    rng, continuing, new = random.Random(0), Kind(), Kind()
    arrivals: list[tuple[float, str, int, bool]] = []
    for name, rate, end in (("turn", turns, min(seconds, turns_end)), ("new", begins, seconds)):
        at, number = 0.0, 0
        while rate and (at := at + rng.expovariate(rate)) < end:
            arrivals.append((at, name, number, False))
            number += 1
    heapq.heapify(arrivals)
    free_at = 0.0
    while arrivals and arrivals[0][0] < seconds:
        now, name, number, is_booked = heapq.heappop(arrivals)
        kind, tokens = (continuing, TURN * prompt // PROMPT) if name == "turn" else (new, prompt)
        kind.offered += not is_booked
        wait = max(0.0, free_at - now)
        request = BoundedRequest((name, number), "", 0, CHAT, prompt_tokens=prompt, cached=prompt - tokens)
        verdict = admission.decide(request, [WorkerEstimate(wait, RATE, tokens)], 0, now)
        if verdict.rejection:
            kind.broken += is_booked
            if name == "new" and rng.random() < returns and admission.ledger.find(request.key) is not None:
                kind.waits.append(verdict.retry_after)
                heapq.heappush(arrivals, (now + verdict.retry_after, name, number, True))
            continue
        free_at = now + wait + tokens / RATE
        kind.admitted += 1
        kind.admitted_at.append(now)
        kind.good += wait <= RETURN_SHARE * CHAT.ttft_bound(0)
    return continuing, new


def test_beyond_capacity_prompts_with_a_cached_context_go_before_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns of conversations need 1.2 times the capacity, and new prompts three times."""

    def served() -> float:
        """Return the share of the capacity that the turns get."""
        continuing, _ = play(60.0, 1.2 * RATE / TURN, 3 * RATE / PROMPT, 0.0, BoundedAdmission())
        return continuing.good * TURN / (60.0 * RATE)

    with_rule = served()
    monkeypatch.setattr(CachedFirst, "next_turn", lambda *_: 0.0)
    assert with_rule > 0.85 and served() < with_rule - 0.05, "without the rule new prompts take their place"


def test_below_capacity_and_among_equals_nothing_is_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(turns: float, begins: float) -> list[int]:
        return [kind.admitted for kind in play(30.0, turns, begins, 0.0, BoundedAdmission())]

    cases = ((0.4 * RATE / TURN, 0.4 * RATE / PROMPT), (0.0, 3 * RATE / PROMPT), (3 * RATE / TURN, 0.0))
    found = [outcome(*case) for case in cases]
    monkeypatch.setattr(CachedFirst, "next_turn", lambda *_: 0.0)
    assert found == [outcome(*case) for case in cases]


def test_a_new_conversation_that_returns_as_told_is_admitted_however_many_turns_arrive() -> None:
    """Turns alone need 1.5 times the capacity. A new prompt goes once a thirty-second of the capacity has computed those before it."""
    continuing, new = play(200.0, 1.5 * RATE / TURN, 0.05, 1.0, BoundedAdmission())
    seconds = 32 * PROMPT / RATE
    assert new.offered >= 5 and continuing.admitted < 0.75 * continuing.offered
    assert new.good == new.admitted and new.broken <= 1, "turns whose clients never return make promises less exact"
    assert max(new.waits) <= new.offered * seconds + 1
    assert new.admitted >= new.offered - 2, "only those whose turn comes after the end are missing"


def test_new_prompts_get_the_capacity_as_soon_as_cached_demand_ends() -> None:
    """For 30 s the turns need nearly everything, and new prompts 1.5 times the capacity. Then there are only new prompts."""
    _, new = play(60.0, 0.97 * RATE / 100, 1.5 * RATE / 500, 0.5, BoundedAdmission(), prompt=500, turns_end=30.0)
    served = 500 * sum(at >= 30.0 for at in new.admitted_at)
    assert served > 0.7 * 30 * RATE, "half of the clients come back"


def wait_after_one(rule: CachedFirst, priority: int, tokens: float, rate: float, now: float = 0.0) -> float:
    """Return how long the second of two equal prompts of 1,000 tokens waits for its turn."""
    rule = deepcopy(rule)
    rule.take_turn(priority, tokens, 1000, rate, now)
    return rule.next_turn(priority, tokens, 1000, rate, now)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), max_size=50), st.integers(0, 2))
def test_equal_shares_and_less_urgent_requests_outbid_nothing(prompts: list[tuple[int, int]], priority: int) -> None:
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
    seconds = 32 * sum(prompts) / RATE
    assert rule.next_turn(0, 1, 1, RATE, 10.0) == pytest.approx(seconds)
    assert rule.next_turn(0, 1, 1, RATE, 12.0) == pytest.approx(max(0.0, seconds - 2)), "it comes closer"
    assert rule.next_turn(0, 1, 1, RATE, 1e9) == 0


def test_turns_of_less_urgent_requests_do_not_delay_urgent_ones() -> None:
    rule = CachedFirst()
    rule.record_refusal(0.0)
    for priority in (-100, 0):
        rule.record(priority, 2 * RATE * HORIZON_SECONDS, 20 * RATE * HORIZON_SECONDS, 0.0)
    for _ in range(6):
        rule.take_turn(0, 2000, 2000, RATE, 0.0)
    seconds = 32 * 2000 / RATE
    assert rule.next_turn(-100, 2000, 2000, RATE, 0.0) == 0 and rule.next_turn(0, 2000, 2000, RATE, 0.0) == pytest.approx(6 * seconds)
    rule.take_turn(-100, 2000, 2000, RATE, 0.0)
    assert rule.next_turn(-100, 2000, 2000, RATE, 0.0) == pytest.approx(seconds)
    assert rule.next_turn(0, 2000, 2000, RATE, 0.0) == pytest.approx(7 * seconds)
    assert rule.next_turn(-100, 2000, 2000, RATE, 3.0) == pytest.approx(seconds - 3), "the most urgent are computed first"
    assert rule.next_turn(0, 2000, 2000, RATE, 3.0) == pytest.approx(7 * seconds - 3), "and only once"


def test_the_turns_of_an_urgent_class_are_its_own() -> None:
    """Cached prompts of both classes need everything, and many less urgent new prompts have turns."""
    admission, cached = BoundedAdmission(), WorkerEstimate(0.1, RATE, TURN)

    def decide(key: str, priority: int, held: int, worker: WorkerEstimate) -> Verdict:
        return admission.decide(BoundedRequest(key, "", priority, CHAT, prompt_tokens=PROMPT, cached=held), [worker], 0, 0.0)

    for number in range(80):
        decide(f"turn {number}", -100 * (number % 2), PROMPT - TURN, cached)
    decide("late", 0, PROMPT - TURN, replace(cached, wait=9.0))
    busy = WorkerEstimate(0.1, RATE, PROMPT)
    verdicts = [decide(f"new {number}", 0, 0, busy) for number in range(6)]
    assert verdicts[-1].rejection == "outbid" and verdicts[-1].retry_after > 60
    assert not decide("urgent", -100, 0, busy).rejection


def test_a_broken_promise_takes_no_second_turn() -> None:
    admission, cached = BoundedAdmission(), WorkerEstimate(0.1, RATE, TURN)

    def decide(key: str, held: int, worker: WorkerEstimate, now: float) -> Verdict:
        return admission.decide(BoundedRequest(key, "", 0, CHAT, prompt_tokens=PROMPT, cached=held), [worker], 0, now)

    def fill(now: float) -> None:
        for number in range(80):
            decide(f"turn {now} {number}", PROMPT - TURN, cached, now)
        decide(f"late {now}", PROMPT - TURN, replace(cached, wait=9.0), now)

    def turn(now: float) -> float:
        return deepcopy(admission._cached_first).next_turn(0, PROMPT, PROMPT, RATE, now)

    busy = WorkerEstimate(0.1, RATE, PROMPT)
    fill(0.0)
    assert not decide("first", 0, busy, 0.0).rejection
    told = [decide(f"new {number}", 0, busy, 0.0) for number in range(3)]
    assert [each.rejection for each in told] == ["outbid"] * 3
    now = told[0].retry_after
    for second in range(2, now + 1):
        fill(second)
    before = turn(now)
    verdict = decide("new 0", 0, replace(busy, wait=5.0), now)
    assert (verdict.rejection, verdict.retry_after) == ("late", 5) and admission.ledger.broken == 1
    assert before > 0 and turn(now) == pytest.approx(before)


def test_the_router_says_why_it_refuses_and_counts_it() -> None:
    worker, warm = Worker("a:1", monotonic), (1, 2, 3)
    worker.load = WorkerLoad(prefill_rate=1000.0, running=1)
    worker.begin_prompt(300, monotonic())
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
    worker.begin_prompt(700, monotonic())
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
    sent["a:1"] = 1500  # 1.5 seconds, and its bound is 1.05
    with pytest.raises(ApiError, match="the first token is expected after 16"):
        check(1)


@pytest.mark.parametrize("forged", [1e6, math.inf, math.nan])
def test_a_forged_backlog_in_the_index_delays_requests_by_four_seconds_at_most(forged: float) -> None:
    """Else one record makes an idle fleet refuse all classes with `Retry-After: 600`."""
    worker = Worker("a:1", monotonic)
    worker.load = WorkerLoad(prefill_rate=1000.0)
    table = cast(WorkerTable, type("Table", (), {"usable": lambda *_: [worker]})())
    gate = SloGate(table, Metrics(WorkerTable()), ServiceClasses([CHAT]), lambda request: {}, lambda address: forged)
    now = worker.load_at
    assert estimate_worker(worker, 100, now, forged).wait <= MOST_SENT_SECONDS
    patient = CHAT.model_copy(update={"ttft_milliseconds": 5000})
    gate.check(ClassTerms(patient, RoutingRequest(100), 0, monotonic(), "", 0), 0)
    if forged == forged:
        with pytest.raises(ApiError) as caught:
            gate.check(ClassTerms(CHAT, RoutingRequest(100), 0, monotonic(), "", 1), 0)
        assert caught.value.status == 429 and "Try again in 4 s." in str(caught.value)


@given(st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 2000), st.booleans()), min_size=1, max_size=80))
def test_a_request_that_returns_as_told_is_served_within_32_times_the_work_before_it(arrivals: list[tuple[float, int, bool]]) -> None:
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


def test_a_cached_prompt_waits_less_where_the_engine_takes_the_best_cached_first() -> None:
    """It is assumed to wait for n prompts of its work. By arrival, all of them go before."""
    worker = Worker("a:1", monotonic)
    worker.load = WorkerLoad(prefill_rate=1000.0, running=1, waiting=4, backlog_tokens=8000)
    now = worker.load_at

    def wait(uncached: int) -> float:
        return estimate_worker(worker, uncached, now).wait

    assert wait(100) == wait(5000) == pytest.approx(8), "by arrival, or not known"
    worker.runs_cached_first = True
    assert wait(100) == pytest.approx(2 + 0.4) and wait(5000) == pytest.approx(8)


@pytest.mark.parametrize("has_score", [False, True])
def test_a_class_excludes_workers_with_long_steps_and_without_a_score_those_beyond_its_bound(has_score: bool) -> None:
    """`RoundRobin`, `Random` and `Session` do not look at the wait, and one worker in time admits the request."""
    table = WorkerTable()
    table.set_addresses(["idle:1", "late:1", "slow:1"])
    for worker in table:
        worker.ready, worker.load_at = True, 100.0
        backlog, step = 5000 * (worker.address == "late:1"), 0.2 if worker.address == "slow:1" else 0.02
        worker.load = WorkerLoad(prefill_rate=1000.0, running=1, backlog_tokens=backlog, step_seconds=step)
    chat = CHAT.model_copy(update={"itl_milliseconds": 100})
    gate = SloGate(table, Metrics(WorkerTable()), ServiceClasses([chat]), lambda request: {}, clock=lambda: 100.0, has_score=has_score)
    terms = ClassTerms(chat, RoutingRequest(100), 0, 100.0)
    gate.check(terms, 0)
    avoided = {address for address, _ in gate.unsuitable(terms)}
    assert avoided == ({"slow:1"} if has_score else {"slow:1", "late:1"})


def test_a_large_fleet_counts_the_workers_that_cache_the_prompt() -> None:
    """They are rarely among the soonest, and the others have to compute all of it."""
    table, held = WorkerTable(), {"10.0.0.39:1": 900}
    table.set_addresses([f"10.0.0.{number}:1" for number in range(40)])
    for worker in table:
        worker.ready = True
        worker.load = WorkerLoad(prefill_rate=1000.0, running=1, backlog_tokens=400 if worker.address in held else 100)
    gate = SloGate(table, Metrics(WorkerTable()), ServiceClasses([CHAT]), lambda request: held)
    strict = CHAT.model_copy(update={"ttft_milliseconds": 900, "ttft_milliseconds_per_thousand_tokens": None})
    gate.check(ClassTerms(strict, RoutingRequest(1000, (1,)), 0, monotonic(), "", 0), 0)
    held.clear()
    with pytest.raises(ApiError):
        gate.check(ClassTerms(strict, RoutingRequest(1000, (1,)), 0, monotonic(), "", 1), 0)


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
