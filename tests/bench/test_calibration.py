"""The pure parts of `end_to_end/calibration`: the fit of the step model, the load, and the block structure."""

import random

import pytest
from bench.end_to_end.calibration import PAGE, REPLY_TOKENS, WORKERS, WORKLOADS, arrival_times, fit_costs, make_prompts, to_requests

from fairlead_worker.scheduler.chunk_sizer import prefill_work


def test_the_fit_finds_the_terms_of_exact_measurements() -> None:
    attention, token, context, decode, fixed, overhead = 1e-7, 1e-4, 2e-6, 1e-3, 0.01, 0.005
    ttfts = [(count, overhead + fixed + token * count + attention * prefill_work(0, count)) for count in (64, 256, 512, 900)]
    steps = [(batch, length, fixed + decode * batch + context * batch * length) for batch, length in ((1, 80), (4, 80), (8, 80), (4, 900))]
    costs, outside = fit_costs(ttfts, steps)
    assert costs == pytest.approx((attention, token, context, decode, fixed)) and outside == pytest.approx(overhead)


def test_no_term_is_negative() -> None:
    costs, outside = fit_costs([(64, 0.02), (256, 0.03), (512, 0.02)], [(1, 80, 0.02), (4, 80, 0.01), (8, 80, 0.01)])
    assert min(*costs, outside) >= 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_equal_prefixes_are_equal_blocks(workload: str) -> None:
    prompts, _ = make_prompts(workload, 60, random.Random(1))
    requests = to_requests(prompts, [0.0] * 60)
    for first, second in zip(range(59), range(1, 60), strict=True):
        one, other = prompts[first].tokens, prompts[second].tokens
        common = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        shared = sum(a == b for a, b in zip(requests[first].blocks, requests[second].blocks, strict=False))
        assert shared == common // PAGE
    assert max(len(prompt.tokens) for prompt in prompts) + REPLY_TOKENS < 4096


def test_half_the_load_takes_twice_the_time() -> None:
    prompts, gaps = make_prompts("zipf", 40, random.Random(2))
    costs = (0.0, 1e-3, 0.0, 0.0, 0.0)
    whole, half = (arrival_times(prompts, gaps, load, costs)[-1] for load in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)
    assert whole * WORKERS >= 1e-3 * len(prompts) * 30, "each question has 30 tokens of its own"
