"""Warm-up: steps before the first request. They fill the caches of all libraries, and measure the prefill rate and a decode step.

So a worker reports that it is ready only after it has computed something, and its first load report has both figures. Routers compare
workers by them: a new worker without a step time would look faster than those that have decoded.
"""

import time
from array import array
from collections.abc import Callable

from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.limits import StepLimits
from fairlead_worker.scheduler.plan import Row, Runner, StepPlan
from fairlead_worker.scheduler.request import Request
from fairlead_worker.scheduler.scheduler import Scheduler

MAX_SECONDS = 0.5
"""Approximate limit of the whole warm-up. If the first prompt takes longer, it runs twice, the second time to measure the rate."""
FIRST_TOKENS = 64
"""Tokens of the first prompt."""
MAX_PROMPT_TOKENS = 512
"""Most tokens of each prompt. Larger steps have several prompts."""
DECODES = 8
"""Most decodes, after a first one that fills caches. The fastest is reported: a pause of the machine makes one slower, never faster."""
GROWTH = 4
"""Factor between the sizes of two steps."""


def warm_up(scheduler: Scheduler, runner: Runner, context: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Run steps with prompts of increasing length, up to the largest idle step or until `MAX_SECONDS` are over, and decode steps.

    `context`: tokens of the longest sequence that the cache holds. All rows use page 0, which no request has yet; the results are
    dropped. Raises what a step raises, so that a broken kernel fails the start-up and not a request.
    """
    began, page_size, samples = clock(), scheduler.cache.page_size, scheduler.config.generates
    most = min(StepLimits.from_config(scheduler.config, page_size).prefill, scheduler.config.max_num_seqs * min(context, MAX_PROMPT_TOKENS))
    tokens = min(FIRST_TOKENS, most)
    _run_step(runner, _plan_prompts(tokens, context, page_size, samples))
    if samples:
        _measure_decodes(scheduler, runner, min(tokens, context) - 1, began + MAX_SECONDS / 4, clock)
    while True:
        seconds = _run_step(runner, _plan_prompts(tokens, context, page_size, samples))
        scheduler.stats.record_warmup(tokens, seconds)
        larger = min(GROWTH * tokens, most)
        if larger == tokens or clock() - began + seconds * larger / tokens > MAX_SECONDS:
            return
        tokens = larger


def _measure_decodes(scheduler: Scheduler, runner: Runner, position: int, until: float, clock: Callable[[], float]) -> None:
    """Run a decode to fill caches, then measured ones: at least one, and others before `until`."""
    for number in range(DECODES + 1):
        decode = StepPlan([_row(0, position, 1, scheduler.cache.page_size, True)], decodes=1, samples=1)
        seconds = _run_step(runner, decode)
        if number:
            scheduler.stats.record_warmup_decode(seconds)
            if clock() >= until:
                return


def _run_step(runner: Runner, plan: StepPlan) -> float:
    seconds = runner.execute(plan).seconds
    for row in plan.rows:
        row.request.finish = "stop"  # the runner drops its state of finished requests
    return seconds


def _plan_prompts(tokens: int, context: int, page_size: int, samples: bool) -> StepPlan:
    longest = min(context, MAX_PROMPT_TOKENS)
    counts = [min(longest, tokens - begin) for begin in range(0, tokens, longest)]
    rows = [_row(number, 0, count, page_size, samples) for number, count in enumerate(counts)]
    return StepPlan(rows, prefill_tokens=tokens, samples=len(rows) * samples)


def _row(number: int, start: int, count: int, page_size: int, samples: bool) -> Row:
    known = start + count
    request = Request(Submit(f"warmup {number}", b"", Sampling(max_tokens=1), 0), array("I", bytes(4 * known)), known, number)
    return Row(request, start, count, array("i", bytes(4 * -(-known // page_size))), samples)
