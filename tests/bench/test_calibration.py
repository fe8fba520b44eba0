"""The pure parts of `end_to_end/calibration`: the terms, the load, the block structure, and the replays."""

import random

import pytest
from bench.common.step_terms import REPLY_TOKENS, Decode, Prefill, Samples, Terms, find_terms, fit
from bench.end_to_end.calibration import (
    PAGE,
    WORKERS,
    WORKLOADS,
    Measured,
    arrival_times,
    make_prompts,
    necessary_seconds,
    simulate_engine,
    simulate_flow,
    to_requests,
)

from fairlead_worker.scheduler.chunk_sizer import prefill_work

TERMS = Terms((1e-7, 4e-4, 2e-6, 1e-3, 0.015), between=0.002, idle_credit=0.006, outside=0.012)


def test_exact_measurements_give_their_terms() -> None:
    attention, token, context, decode, fixed = TERMS.costs
    samples = Samples()
    for count, steps in ((24, 1), (64, 1), (256, 1), (512, 1), (900, 2), (1400, 3)):
        spent = fixed * steps + token * count + attention * prefill_work(0, count) - TERMS.idle_credit
        ttft = TERMS.outside + spent + (steps - 1) * TERMS.between
        decoding = 7 * (fixed + decode + context * count)
        samples.prefills.append(Prefill(count, ttft, steps, spent, ttft + decoding + 7 * TERMS.between, 7, decoding))
    for batch, length in ((1, 80), (4, 80), (8, 80), (4, 900)):
        samples.decodes.append(Decode(batch, length, TERMS.between + fixed + decode * batch + context * batch * length))
    found = find_terms(samples)
    assert found.costs == pytest.approx(TERMS.costs)
    assert (found.between, found.idle_credit, found.outside) == pytest.approx((TERMS.between, TERMS.idle_credit, TERMS.outside))


@pytest.mark.parametrize(("step_seconds", "decode_steps", "gap"), [(0.0, 7, 0.02), (0.02, 0, 0.02), (0.02, 7, 0.0)])
def test_samples_without_step_times_are_an_error(step_seconds: float, decode_steps: float, gap: float) -> None:
    samples = Samples([Prefill(24, 0.03, 1, step_seconds, 0.2, decode_steps, 0.1)], [Decode(1, 80, gap)])
    with pytest.raises(ValueError, match="measure"):
        find_terms(samples)


def test_no_term_is_negative() -> None:
    assert min(fit([(64.0, 1.0), (256.0, 1.0), (512.0, 1.0)], [0.03, 0.02, 0.01])) >= 0


@pytest.mark.parametrize("workload", WORKLOADS)
def test_both_simulators_find_the_same_prefixes(workload: str) -> None:
    prompts, gaps = make_prompts(workload, 60, random.Random(3))
    times = arrival_times(prompts, gaps, 0.2, TERMS.costs)
    engine, flow = (simulate(to_requests(prompts, times), Measured(TERMS, 0.003, 0.0), 0) for simulate in (simulate_engine, simulate_flow))
    assert engine.cached == pytest.approx(flow.cached, abs=0.07) and engine.cached > 0
    assert min(*engine.ttfts, *flow.ttfts) > TERMS.outside + 0.003


def test_a_request_alone_takes_its_terms() -> None:
    prompts, _ = make_prompts("bursts", 1, random.Random(4))
    requests, measured = to_requests(prompts, [0.0]), Measured(TERMS, 0.003, 0.0)
    alone = requests[0].prompt_tokens
    attention, token, _, _, fixed = TERMS.costs
    assert alone <= 512, "one step"
    expected = attention * prefill_work(0, alone) + token * alone + fixed - TERMS.idle_credit + TERMS.outside + 0.003
    assert simulate_engine(requests, measured, 0).ttfts == pytest.approx([expected])
    assert necessary_seconds(requests, TERMS.costs) > expected - TERMS.outside


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
