"""The autoscaler's pure core on a modelled fleet: steady load, steady size; a step of load, one decision; silence never scales down."""

import json
import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tests.operator.support.manifests import SETTINGS, container, deployment, pod, service

from fairlead_operator.api.scaling import Scaling
from fairlead_operator.children import router
from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, Recommendation
from fairlead_operator.revisions import router_revision, worker_revision
from fairlead_operator.scaling.costs import deletion_costs
from fairlead_operator.scaling.decision import decide, history_seconds, recent_recommendations
from fairlead_operator.scaling.demand import Demand, RouterReport
from fairlead_operator.scaling.recommendation import MAX_LOAD, WINDOW, Arrivals, WorkerPool, recommend
from fairlead_operator.scaling.state import scaling_state
from fairlead_router.config import read_config

LOOK = 5
NOW = datetime(2026, 1, 1, tzinfo=UTC)
UNSHRUNK = settings(deadline=None, max_examples=15, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # an hour's model each


def scaling(**fields: Any) -> Scaling:
    return Scaling.model_validate({"minReplicas": 1, "maxReplicas": 64, "target": {"ttftMilliseconds": 2000}, **fields})


def worker(name: str = "w0", **fields: Any) -> dict[str, Any]:
    idle = {"running": 0, "waiting": 0, "backlog_tokens": 0, "pending_tokens": 0, "step_seconds": 0.02, "max_running": 256}
    cache = {"pages_free": 1000, "pages_total": 1000, "hit_tokens": 0, "unique_share": None}
    return {"pod": name, "address": f"{name}:8000", "usable": True, **idle, **cache, **fields}


def page(workers: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    asked = {"idle_seconds": 0.0, "active": 0, "queued": 0, "queued_tokens": 0, "requests_per_second": 0.0, "prompt_tokens_per_second": 0.0}
    return {**asked, "cached_share": 0.0, "answer_seconds": 0.0, "prefill_rate": 0.0, "workers": workers or [], **fields}


def reports(*pages: dict[str, Any] | None) -> list[RouterReport | None]:
    return [None if one is None else parse(one) for one in pages]


def parse(page: dict[str, Any]) -> RouterReport:
    return msgspec.json.decode(json.dumps(page), type=RouterReport)


@dataclass
class Model:
    """Workers that compute `rate` prompt tokens a second, a queue before them, and starts that take `start` seconds. Steps of a second.

    Pages are what routers would say, with the routers' own window; `seen` decides which of two routers answers.
    """

    scaling: Scaling
    rate: float
    start: int
    prompt: int = 500
    desired: int = 1
    now: int = 0
    backlog: float = 0.0
    ready_at: list[int] = field(default_factory=lambda: [0])
    came: deque[float] = field(default_factory=lambda: deque(maxlen=int(WINDOW)))
    recommendations: list[Recommendation] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    quiet: int = 0

    @property
    def ready(self) -> int:
        return sum(at <= self.now for at in self.ready_at)

    def second(self, tokens: float) -> None:
        self.now += 1
        self.came.append(tokens)
        self.quiet = 0 if tokens or self.backlog else self.quiet + 1
        self.backlog = max(0.0, self.backlog + tokens - self.ready * self.rate)
        if self.now % LOOK == 0 or (self.desired == 0 and tokens):
            self.look()

    def look(self, answering: tuple[bool, bool] = (True, True)) -> None:
        demand = Demand.of(reports(*(self._page(number) if heard else None for number, heard in enumerate(answering))))
        target = self.scaling.target
        assert target is not None
        if any(answering):
            pool = WorkerPool(self.desired, self.ready, self.start)
            self.recommendations.append(recommend(demand, pool, target.seconds, float(self.now), self.recommendations))
            self.recommendations[:] = recent_recommendations(self.recommendations, history_seconds(self.scaling, pool))
        decision = decide(self.scaling, self.desired, self.recommendations)
        if decision.desired != self.desired:
            self.sizes.append((self.now, decision.desired))
            self.reasons.append(decision.reason)
            added = decision.desired - len(self.ready_at)
            self.ready_at = (self.ready_at + [self.now + self.start] * max(0, added))[: decision.desired]
            self.desired = decision.desired

    def _page(self, number: int) -> dict[str, Any]:
        """Half of the requests come by each router; the first sees all of the queue."""
        rate = sum(self.came) / WINDOW / 2
        busy = int(bool(self.backlog or (self.came and self.came[-1])))
        each = self.backlog / max(1, self.ready)
        workers = [worker(f"w{one}", backlog_tokens=round(min(each, 2 * self.rate)), running=busy) for one in range(self.ready)]
        queued = self.backlog - sum(one["backlog_tokens"] for one in workers)
        return page(
            workers,
            active=busy,
            idle_seconds=float(self.quiet),
            requests_per_second=rate / self.prompt,
            prompt_tokens_per_second=rate,
            queued_tokens=max(0, round(queued)) if number == 0 else 0,
            prefill_rate=self.rate,
        )


rates = st.floats(1000, 50_000)
loads = st.floats(0.05, 20.0)  # of one worker's rate
starts = st.integers(5, 400)


@given(rates, loads, starts, st.integers(0, 2**32))
@example(rate=43978.39446259081, load=18.46908763161779, start=400, seed=831)  # raised at 1,625 s: 492 s of one worker's work still wait
@example(rate=9158.361922067397, load=0.9113621272901568, start=332, seed=927301052)  # one worker, busy for nine tenths of its time
@UNSHRUNK
def test_a_steady_load_has_a_steady_size(rate: float, load: float, start: int, seed: int) -> None:
    """From when what piled up as the first workers started is worked off, which is planned to take five times a start: until then prompts
    wait for longer than the target, and a window of more than usual may call for one more.

    A fleet that has room for noise, as a size that is reckoned has (`BUSIEST`), is never changed from then on. A smaller one, which served
    well enough so far, gets its room once, should noise ever keep prompts waiting beyond the target for a whole window.
    """
    chance = random.Random(seed)
    model, settled, since = Model(scaling(), rate, start), 0, math.inf
    while model.now < since + 800:
        model.second(max(0.0, load * rate * chance.gauss(1.0, 0.3)))  # noise of each second's arrivals
        if not settled and model.now >= 1600 and model.backlog < model.ready * rate:
            settled, since = model.desired, model.now
        assert model.now < 8000, "what piled up is worked off"
    later = [size for at, size in model.sizes if at > since]
    if settled * MAX_LOAD >= load:
        assert later == [], f"{model.sizes} {settled}"
    else:
        assert len(later) <= 1 and all(size * MAX_LOAD >= load * 0.9 for size in later), f"{model.sizes} {settled}"
        assert all("over target" in reason for reason in model.reasons[len(model.sizes) - len(later) :])
    assert model.backlog < 4 * rate * model.desired, "what comes is computed"
    assert math.ceil(load * 0.95) <= model.desired <= math.ceil(load / 0.3 / 0.8) + 2


@given(rates, st.floats(0.1, 1.5), st.floats(2.0, 8.0), starts)
@UNSHRUNK
def test_a_step_of_load_is_reached_in_one_decision_and_never_undone(rate: float, before: float, factor: float, start: int) -> None:
    model = Model(scaling(), rate, start, desired=2, ready_at=[0, 0])
    for _ in range(600):
        model.second(before * rate)
    model.sizes.clear()
    model.reasons.clear()
    low = model.desired
    for _ in range(2400):
        model.second(before * factor * rate)
    raised = [size for _, size in model.sizes]
    assert len(raised) <= 1, f"{low} -> {model.sizes} {model.reasons}"
    assert before * factor * 0.95 <= model.desired <= math.ceil(before * factor / 0.3) + 1
    if raised:
        assert model.sizes[0][1] > low and "expected TTFT" in model.reasons[0] and "over target 2s" in model.reasons[0]
    for _ in range(1800):
        model.second(before * rate)
    assert model.backlog == 0
    lowered = [size for _, size in model.sizes[len(raised) :]]
    assert lowered == sorted(lowered, reverse=True), "down only, after the load has gone down"


def seen_rates(*rates: float, every: float = 5.0) -> list[Recommendation]:
    """Recommendations with these arrivals per second, the last one now."""
    return [Recommendation(every * number, 0, 1, 0.0, True, tokens_per_second=rate) for number, rate in enumerate(rates)]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(1, 30), st.floats(0, 400))
@settings(deadline=None)
def test_windows_of_arrivals_add_up_and_grow(rates: list[float], every: float, longest: float) -> None:
    *recent, last = seen_rates(*rates, every=every)
    windows = list(Arrivals(last.at, last.tokens_per_second, recent).windows(longest))
    assert windows[0] == (WINDOW, WINDOW * rates[-1]) and len(windows) <= len(rates)
    assert all(short < long and few <= many for (short, few), (long, many) in pairwise(windows))
    assert all(tokens <= seconds * max(rates) * (1 + 1e-9) + 1e-9 for seconds, tokens in windows)
    if len(set(rates)) == 1 and every <= WINDOW:
        assert all(tokens == pytest.approx(seconds * rates[0]) for seconds, tokens in windows)


@pytest.mark.parametrize("number", [math.nan, math.inf, 1e308, 10**400, "many"])
def test_a_report_with_a_number_that_cannot_be_is_refused(number: object) -> None:
    """Otherwise it stays in the record of arrivals, and no size can be computed until it is forgotten."""
    for pages in (page(prompt_tokens_per_second=number), page(active=number), page([worker(waiting=number)])):
        with pytest.raises(ValueError):
            parse(pages)


def test_workers_stay_for_the_bursts_that_new_ones_would_be_too_late_for() -> None:
    """A burst of 30 s at ten workers' rate, at times far apart: with a target of 60 s its work may take 90 s, with 2 s it may take 32 s."""
    burst = [0.0] * 30 + [10_000.0] * 6 + [0.0] * 6
    record = seen_rates(*burst)
    asked: dict[str, Any] = {"active": 1, "requests_per_second": 100.0, "prefill_rate": 1000.0}

    def size(target: float) -> int:
        """Return the highest `scale_down_to` of the record, which is what stays."""
        sizes = []
        for number, one in enumerate(record):
            demand = Demand.of(reports(page([worker()], **asked, prompt_tokens_per_second=one.tokens_per_second)))
            sizes.append(recommend(demand, WorkerPool(1, 1, 60.0), target, one.at, record[:number]).scale_down_to)
        return max(sizes)

    assert size(60.0) == 5 and 9 <= size(2.0) <= 13


def test_a_backlog_that_grows_calls_for_workers_before_the_target_is_missed() -> None:
    slow = [worker("a", backlog_tokens=1000), worker("b", backlog_tokens=1000)]
    seen = page(slow, active=9, requests_per_second=3.0, prompt_tokens_per_second=3000.0, prefill_rate=1000.0)
    demand, recent = Demand.of(reports(seen)), seen_rates(*[3000.0] * 20)
    at = recent[-1].at + 5
    early = recommend(demand, WorkerPool(2, 2, 60.0), 20.0, at, recent)
    assert early.scale_up_to >= 4 and early.why == "expected TTFT 32.0s in 60s over target 20s"
    assert recommend(demand, WorkerPool(2, 2, 10.0), 20.0, at, recent).scale_up_to == 0, "workers that start in 10 s can wait"


def test_the_reason_says_what_was_seen_and_what_is_done() -> None:
    slow = [worker("a", backlog_tokens=16_000), worker("b", backlog_tokens=16_000)]
    seen = page(slow, active=40, requests_per_second=40.0, prompt_tokens_per_second=20_000.0, prefill_rate=6000.0)
    recommendations = [recommend(Demand.of(reports(seen)), WorkerPool(2, 2, 30.0), 2.0, at) for at in (0.0, 5.0, 10.0, 15.0)]
    assert decide(scaling(), 2, recommendations[:3]).desired == 2, "not before a whole window has shown it"
    decision = decide(scaling(), 2, recommendations)
    assert decision.desired == 5 and decision.reason == "expected TTFT 2.8s over target 2s: 2 -> 5"
    bounded = decide(scaling(maxReplicas=3), 2, recommendations)
    assert bounded.desired == 3 and "(spec.scaling allows 1 to 3): 2 -> 3" in bounded.reason


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=200, max_size=200), st.integers(2, 9))
@UNSHRUNK
def test_a_router_that_does_not_answer_never_scales_down(heard: list[tuple[bool, bool]], size: int) -> None:
    model = Model(scaling(minReplicas=0, idleTimeoutSeconds=60), 1000.0, 10, desired=size, ready_at=[0] * size)
    complete_since = 0
    for answers in heard:
        model.now += LOOK
        model.quiet += LOOK
        before = model.desired
        model.look(answers)
        complete_since = model.now if not all(answers) else complete_since
        if model.desired < before:
            idle = model.desired == 0 and all(answers)
            assert idle or model.now - complete_since >= 300 - LOOK, "one silent router in the time of stabilization holds the size"
            break


def test_to_zero_after_idle_and_back_with_the_first_request() -> None:
    model = Model(scaling(minReplicas=0, idleTimeoutSeconds=120), 1000.0, 30)
    for _ in range(100):
        model.second(300.0)
    for _ in range(130):
        model.second(0.0)
    assert model.sizes == [(225, 0)] or model.desired == 0, model.sizes
    assert model.reasons[-1].startswith("no request for 12") and model.reasons[-1].endswith("s: 1 -> 0")
    model.second(500.0)
    assert model.desired == 1 and model.reasons[-1].endswith("wait for a worker: 0 -> 1")
    for _ in range(600):
        model.second(300.0)
    assert model.desired == 1, model.sizes


def test_a_worker_that_loads_for_longer_than_idle_after_is_not_taken_away_before_it_has_served() -> None:
    idle = Demand.of(reports(page(idle_seconds=900.0)))
    bounds = scaling(minReplicas=0, idleTimeoutSeconds=600)

    def size(serving_since: float) -> int:
        ready = int(serving_since < math.inf)
        return decide(bounds, 1, [recommend(idle, WorkerPool(1, ready, 60.0, serving_since), 2.0, 5000.0)]).desired

    assert size(math.inf) == 1, "it loads: the client has gone, and will retry"
    assert size(4990.0) == 1 and size(4401.0) == 1 and size(4400.0) == 0


def test_a_burst_at_zero_brings_all_that_it_needs_at_once() -> None:
    model = Model(scaling(minReplicas=0), 1000.0, 60, desired=0, ready_at=[])
    model.second(60_000.0)  # the work of four workers for the routers' window: at the load that 2 s allow, of six
    assert model.desired == 6, model.reasons
    for _ in range(900):
        model.second(0.0)
    assert max(size for _, size in model.sizes) == 6, f"what waits while they start does not call for more: {model.sizes}"


def test_prompts_that_alone_take_longer_than_the_target_do_not_call_for_workers_without_end() -> None:
    model = Model(scaling(), 1000.0, 30, prompt=8000)
    for second in range(3000):
        model.second(8000.0 if second % 20 == 0 else 0.0)
    assert model.desired <= 4, model.sizes


def test_decodes_that_fill_all_workers_call_for_more_although_no_prompt_waits() -> None:
    full = [worker(name, running=16, waiting=8, max_running=16) for name in ("a", "b")]
    seen = page(full, active=48, requests_per_second=4.0, prompt_tokens_per_second=400.0, answer_seconds=15.0, prefill_rate=1e5)
    demand = Demand.of(reports(seen))
    assert recommend(demand, WorkerPool(2, 2, 30.0), 2.0, 0.0).scale_up_to == 5, "60 answers at once, 16 a worker, nine tenths of them"
    assert recommend(demand, WorkerPool(6, 2, 30.0), 2.0, 0.0).scale_up_to == 0, "they are on their way"
    few_pages = [worker(name, running=8, waiting=3, pages_free=0) for name in ("a", "b")]
    seen = page(few_pages, active=22, requests_per_second=2.0, prompt_tokens_per_second=200.0, answer_seconds=20.0, prefill_rate=1e5)
    assert recommend(Demand.of(reports(seen)), WorkerPool(2, 2, 30.0), 2.0, 0.0).scale_up_to == 6


def test_caches_count_as_work_that_need_not_be_done() -> None:
    asked = {"active": 9, "requests_per_second": 10.0, "prompt_tokens_per_second": 10_000.0, "prefill_rate": 1000.0}
    cold = Demand.of(reports(page([worker()], **asked)))
    warm = Demand.of(reports(page([worker()], cached_share=0.9, **asked)))
    assert cold.tokens_per_second == 10_000 and warm.tokens_per_second == pytest.approx(1000)


def test_a_worker_counts_once_for_two_routers_and_a_draining_worker_does_not_count() -> None:
    mine = page([worker("a", running=4, backlog_tokens=900, pending_tokens=100), worker("b", usable=False, running=9)], queued_tokens=50)
    other = page([worker("a", running=5, backlog_tokens=800, pending_tokens=950), worker("b", usable=False, running=9)])
    demand = Demand.of(reports(mine, other))
    assert [one.running for one in demand.workers] == [5] and demand.backlog_tokens == 50 + 1050 and demand.complete
    assert not Demand.of(reports(mine, None)).complete and not Demand.of([]).complete


def test_a_restarted_operator_holds_the_size_until_it_has_seen_enough() -> None:
    quiet = [Recommendation(float(at), 0, 1, 0.0, True) for at in range(0, 290, 5)]
    assert decide(scaling(), 6, ()).desired == 6 and decide(scaling(), 6, quiet).desired == 6
    later = [*quiet, *(replace(quiet[-1], at=float(at)) for at in range(290, 305, 5))]
    assert decide(scaling(), 6, later).desired == 1
    assert decide(scaling(), None, ()).desired == 1 and decide(scaling(minReplicas=3), None, ()).desired == 3


needs_of = st.builds(
    lambda more, fewest, idle, asked, lately: Recommendation(0.0, more, max(more, fewest), 0.0 if asked else idle, asked, lately),
    st.integers(0, 9),
    st.integers(1, 9),
    st.floats(0, 100),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(needs_of, max_size=12), st.integers(0, 12), st.integers(0, 4), st.integers(1, 9), st.sampled_from([1, 30]))
@settings(deadline=None)
def test_a_decision_is_within_bounds_and_the_same_needs_do_not_change_it_again(
    seen: list[Recommendation], current: int, least: int, more: int, stable: int
) -> None:
    fields: dict[str, Any] = {"minReplicas": least, "maxReplicas": least + more, "scaleDown": {"stabilizationWindowSeconds": stable}}
    bounds = scaling(**fields, **({} if least else {"idleTimeoutSeconds": 20}))
    recommendations = [replace(one, at=5.0 * number) for number, one in enumerate(seen)]
    first = decide(bounds, current, recommendations)
    assert bounds.min_replicas <= first.desired <= bounds.max_replicas and bool(first.reason) == (first.desired != current)
    again = decide(bounds, first.desired, recommendations)
    assert again == type(again)(first.desired), f"{current} -> {first} -> {again}"


def test_the_pod_whose_cache_saved_least_and_that_runs_least_costs_least() -> None:
    def alive(name: str, **metadata: Any) -> dict[str, Any]:
        return {"metadata": {"name": name, "labels": {"app.kubernetes.io/component": "worker"}, **metadata}}

    hot, shared, busy = (
        worker("hot", hit_tokens=90_000, unique_share=0.8),
        worker("shared", hit_tokens=90_000, unique_share=0.01),
        None,
    )
    busy = worker("busy", hit_tokens=100, running=40)
    going = worker("going", usable=False)
    pods = [alive("hot"), alive("shared"), alive("busy"), alive("new"), alive("going", deletionTimestamp="2026-01-01T00:00:00Z")]
    costs = deletion_costs(pods, reports(page([hot, shared, busy, going]), None))
    assert sorted(costs, key=costs.__getitem__) == ["new", "shared", "busy", "hot"] and costs["new"] == 0
    assert deletion_costs(pods, [None]) == {}


def test_only_routers_of_services_with_scale_to_zero_get_its_flag() -> None:
    target = {"maxReplicas": 3, "target": {"ttftMilliseconds": 2000}}
    plain, sized, zero = service(), service(scaling=target), service(scaling={**target, "minReplicas": 0})
    assert router_revision(plain) == router_revision(sized) == router_revision(service(scaling={"minReplicas": 0, "maxReplicas": 3}))
    assert router_revision(zero) != router_revision(plain) and worker_revision(zero) == worker_revision(plain)
    assert read_config(router.arguments(zero, SETTINGS)).ready_without_workers
    assert not read_config(router.arguments(sized, SETTINGS)).ready_without_workers


def test_the_deployment_is_the_state_and_the_status_keeps_the_reason() -> None:
    one = service(scaling={"minReplicas": 0, "maxReplicas": 5, "target": {"ttftMilliseconds": 2000}})
    seen = Observed({"worker": deployment("worker", 4), "router": deployment("router", 2)})

    def size(plan: Desired) -> tuple[int, str]:
        (made,) = [body for body in plan.objects if body["kind"] == "Deployment" and body["metadata"]["name"] == "qwen-worker"]
        assert plan.status.scaling is not None and plan.status.scaling.desired_replicas == made["spec"]["replicas"]
        return made["spec"]["replicas"], plan.status.scaling.message

    assert size(desired(one, Observed(), SETTINGS, NOW)) == (1, "first worker")
    assert size(desired(one, seen, SETTINGS, NOW)) == (4, "")
    idle = replace(seen, recommendations=(Recommendation(1.0, 0, 1, 601.0, False),))
    plan = desired(one, idle, SETTINGS, NOW)
    assert size(plan) == (0, "no request for 601s: 4 -> 0") and plan.decision is not None
    applied = replace(idle, deployments={"worker": deployment("worker", 0), "router": deployment("router", 2)}, decision=plan.decision)
    after = desired(one, applied, SETTINGS, NOW)
    assert size(after) == (0, "no request for 601s: 4 -> 0") and after.decision is None
    said = {one.type: (one.status, one.reason) for one in after.status.conditions}
    assert said["Ready"] == said["Available"] == ("True", "Asleep") and said["Routable"][0] == "True"
    status = after.status.model_dump(mode="json", by_alias=True)
    restarted = service(scaling={"minReplicas": 0, "maxReplicas": 5, "target": {"ttftMilliseconds": 2000}}, status=status)
    assert size(desired(restarted, replace(applied, recommendations=(), decision=None), SETTINGS, NOW)) == (
        0,
        "no request for 601s: 4 -> 0",
    )


def test_the_hint_for_waiting_clients_describes_the_pods() -> None:
    one = service(scaling={"maxReplicas": 5, "target": {"ttftMilliseconds": 2000}})
    loading = pod("qwen-worker-1", containerStatuses=[container({"running": {}}, started=False)])
    loading["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    ready = pod("qwen-worker-2", conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:01:30Z"}])
    ready["metadata"]["creationTimestamp"] = "2026-01-01T00:00:10Z"
    seen = scaling_state(one, Observed({"worker": deployment("worker", 2, ready=1)}, (loading, ready)))
    assert seen is not None and seen.pool == WorkerPool(2, 1, 80.0, NOW.timestamp() + 90)
    assert seen.hint(NOW.timestamp() + 41) == {"wanted": 2, "starting": 1, "seconds": 41, "reason": "Loading", "advancing": 1}
    nowhere = pod("qwen-worker-1", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}])
    stuck = scaling_state(one, Observed({"worker": deployment("worker", 2, ready=1)}, (nowhere, ready)))
    assert stuck is not None and stuck.hint(NOW.timestamp())["advancing"] == 0, "waiting alone brings no node"
    canary = pod("qwen-worker-canary-1", conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}])
    canary["metadata"] |= {"creationTimestamp": "2025-12-31T23:00:00Z"}
    canary["metadata"]["labels"]["fairlead.dev/track"] = "canary"
    evicted = pod("qwen-worker-0", phase="Failed", reason="Evicted")
    evicted["metadata"] |= {"creationTimestamp": "2025-12-01T00:00:00Z"}
    assert scaling_state(one, Observed({"worker": deployment("worker", 2, ready=1)}, (loading, ready, canary, evicted))) == seen
    assert scaling_state(service(), Observed({"worker": deployment("worker", 2)})) is None
