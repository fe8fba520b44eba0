"""Admission by bounds in simulated time: goodput under overload, and whether the promises of rejections hold."""

import math

import pytest
from tests.router.serving.simulated_service import CHAT, RATE, run

from fairlead_router.service_classes import ServiceClass
from fairlead_router.serving.bounded_admission import BoundedAdmission, BoundedRequest, WorkerEstimate
from fairlead_router.serving.promise_ledger import MAX_SECONDS

SECONDS = 40.0


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("returns", [1.0, 0.5, 0.0])
def test_goodput_stays_level_from_capacity_to_three_times_of_it(workers: int, returns: float) -> None:
    def goodput(load: float) -> float:
        """Mean of two seeds, as a share of the capacity."""
        runs = [run(load, workers=workers, returns=returns, seed=seed, seconds=SECONDS, admission=BoundedAdmission()) for seed in range(2)]
        return sum(each.good_tokens for each in runs) / len(runs) / (SECONDS * RATE * workers)

    at_capacity = goodput(1.0)
    assert at_capacity > 0.8
    for load in (1.5, 3.0):
        assert goodput(load) > 0.95 * at_capacity, load
    assert run(1.5, workers=workers, seconds=SECONDS).good_tokens < 0.5 * at_capacity * SECONDS * RATE * workers, (
        "without admission control"
    )


@pytest.mark.parametrize(("workers", "load"), [(1, 0.8), (1, 1.0), (1, 1.5), (1, 3.0), (4, 2.0)])
def test_every_rejected_request_that_returns_when_told_is_admitted_and_meets_its_bound(workers: int, load: float) -> None:
    for seed in range(2):
        admission = BoundedAdmission()
        outcome = run(load, workers=workers, seed=seed, seconds=SECONDS, admission=admission)
        assert outcome.returned_admitted >= (1.0 if workers == 1 else 0.97) * outcome.returned, "several workers are no exact fluid queue"
        assert outcome.returned_admitted - outcome.returned_good <= 10 * workers, "only those without a first token before the end"
        assert outcome.returned > 100 or load <= 1


@pytest.mark.parametrize(("returns", "error", "share"), [(1.0, 0.2, 0.95), (0.5, 0.0, 0.94), (0.5, 0.2, 0.92)])
def test_most_promises_hold_although_estimates_err_and_others_do_not_return(returns: float, error: float, share: float) -> None:
    admission = BoundedAdmission()
    outcome = run(3.0, workers=2, returns=returns, error=error, seconds=SECONDS, admission=admission)
    assert outcome.returned_admitted >= share * outcome.returned > 100
    assert outcome.good >= 0.95 * outcome.admitted


def request(service_class: ServiceClass = CHAT, elapsed: float = 0.0) -> BoundedRequest:
    return BoundedRequest("key", "", 0, service_class, elapsed)


def test_the_worker_that_holds_the_prompt_counts_with_its_bound_and_its_work() -> None:
    warm, cold = WorkerEstimate(1.05, RATE, 100), WorkerEstimate(0.85, RATE, 4000)
    assert BoundedAdmission().decide(request(), [cold], 0, 0.0).rejection == "", "a bound of 3 s, of which 1 s is its own work"
    assert BoundedAdmission().decide(request(), [warm], 0, 0.0).rejection == "late", "a cached prompt has a bound of 1.05 s"
    later = WorkerEstimate(1.4, RATE, 4000)
    assert BoundedAdmission().decide(request(), [later], 0, 0.0).rejection == "late", "it may not wait for longer than a cached prompt"
    assert BoundedAdmission().decide(request(), [warm, cold], 0, 0.0).rejection == "", "some worker suffices"
    stuck = [WorkerEstimate(100.0, RATE, 1000)] * 3
    assert BoundedAdmission().decide(request(), [*stuck, WorkerEstimate(0.0, RATE, 1000)], 0, 0.0).rejection == "", "one of four suffices"
    assert BoundedAdmission().decide(request(), [warm, cold], 20_000, 0.0).rejection == "late", "the queue counts"
    assert BoundedAdmission().decide(request(elapsed=1.5), [cold], 0, 0.0).rejection == "late", "so does the time since the arrival"


def test_a_prompt_that_is_too_long_for_its_bound_runs_only_where_it_delays_no_request() -> None:
    strict = request(ServiceClass(name="strict", ttft_milliseconds=100))
    busy, idle = WorkerEstimate(0.01, RATE, 4000), WorkerEstimate(0.0, RATE, 4000, is_idle=True)
    verdict = BoundedAdmission().decide(strict, [busy], 0, 0.0)
    assert (verdict.rejection, verdict.retry_after, verdict.bound) == ("too_long", 0, 0.1) and verdict.expected == pytest.approx(1.01)
    assert BoundedAdmission().decide(strict, [busy, idle], 0, 0.0).rejection == ""
    assert BoundedAdmission().decide(strict, [WorkerEstimate(9.0, 0.0, 4000)], 0, 0.0).rejection == "", "an unknown rate may be fast"


def test_a_prompt_that_a_busy_worker_caches_is_late_and_not_too_long() -> None:
    """It can be admitted once that worker is free, while status 400 tells the client not to send it again."""
    strict = request(ServiceClass(name="strict", ttft_milliseconds=100))
    cold, cached = WorkerEstimate(0.01, RATE, 4000), WorkerEstimate(100.0, RATE, 40)
    verdict = BoundedAdmission().decide(strict, [cold, cached], 0, 0.0)
    assert (verdict.rejection, verdict.retry_after, verdict.bound) == ("late", 100, 0.1) and verdict.expected == pytest.approx(100.01)
    idle = WorkerEstimate(0.0, RATE, 4000, is_idle=True)
    assert BoundedAdmission().decide(strict, [idle, cached], 0, 0.0).rejection == "", "an idle worker computes it at once"


@pytest.mark.parametrize("wait", [1e9, math.inf])
def test_a_wait_without_end_has_the_longest_promise(wait: float) -> None:
    admission = BoundedAdmission()
    verdict = admission.decide(request(), [WorkerEstimate(wait, RATE, 100)], 0, 0.0)
    assert (verdict.rejection, verdict.retry_after) == ("late", MAX_SECONDS) and not len(admission.ledger)


def test_workers_with_long_steps_are_avoided_and_reject_if_all_are_slow() -> None:
    smooth = request(ServiceClass(name="smooth", itl_milliseconds=50))
    slow, fast = WorkerEstimate(0.0, RATE, 10, step_seconds=0.06), WorkerEstimate(9.0, RATE, 10, step_seconds=0.05)
    assert BoundedAdmission().decide(smooth, [slow, fast], 0, 0.0).rejection == ""
    verdict = BoundedAdmission().decide(smooth, [slow], 0, 0.0)
    assert (verdict.rejection, verdict.retry_after) == ("itl", 1)
    assert smooth.can_start(fast) and not smooth.can_start(slow)


def test_a_request_that_returns_early_is_told_the_same_time_again() -> None:
    admission, busy = BoundedAdmission(), WorkerEstimate(5.0, RATE, 1000)
    assert admission.decide(request(), [busy], 0, 0.0).retry_after == 5
    assert admission.decide(request(), [busy], 0, 1.5).retry_after == 4 and len(admission.ledger) == 1
    assert admission.decide(request(), [WorkerEstimate(0.0, RATE, 1000)], 0, 2.0).rejection == "" and not len(admission.ledger)
    assert (admission.ledger.kept, admission.ledger.broken) == (1, 0)
