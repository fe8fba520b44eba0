"""Steps before the first request."""

from collections.abc import Sequence

import pytest

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.warmup import DECODES, MAX_PROMPT_TOKENS, MAX_SECONDS, warm_up
from fairlead_worker.scheduler.budget import idle_tokens
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler


class Timed:
    """A runner that takes `seconds` for each token, on a clock of its own; the first step of each kind takes five times that."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult:
        tokens = sum(row.count for row in plan.rows)
        known = {plan.decodes > 0 for plan in self.plans}
        seconds = tokens * self.seconds * (1 if (plan.decodes > 0) in known else 5)
        self.plans.append(plan)
        self.now += seconds
        return StepResult([[1]] * plan.samples, seconds=seconds)

    def tokens(self) -> Sequence[int]:
        return [plan.prefill_tokens for plan in self.plans]


def make(seconds: float, pages: int = 1000, **config: object) -> tuple[Scheduler, Timed]:
    made = {"max_model_len": 4096, "chunked_prefill_size": 512, "idle_prefill_chunks": 4} | config
    scheduler = Scheduler(SchedulerConfig(**made), PrefixCache(PagePool(pages, 4), 16, extend))  # type: ignore[arg-type]
    return scheduler, Timed(seconds)


def run(scheduler: Scheduler, runner: Timed) -> None:
    warm_up(scheduler, runner, 4096, lambda: runner.now)


def test_steps_grow_up_to_the_largest_idle_one() -> None:
    scheduler, runner = make(1e-5)
    run(scheduler, runner)
    assert runner.tokens() == [64, *[0] * (1 + DECODES), 64, 256, 1024, 2048]
    assert max(row.count for plan in runner.plans for row in plan.rows) == MAX_PROMPT_TOKENS
    assert all(not any(row.pages) and len(row.pages) * 4 >= row.end for plan in runner.plans for row in plan.rows), "page 0 alone"


def test_the_rates_are_those_of_the_last_steps_and_nothing_is_counted() -> None:
    scheduler, runner = make(1e-4)
    run(scheduler, runner)
    assert scheduler.stats.prefill_rate == pytest.approx(1e4, rel=0.01)
    assert idle_tokens(scheduler.config, scheduler.stats.prefill_rate) == 2048, "known before the first request"
    assert scheduler.load().step_seconds == pytest.approx(1e-4), "routers compare new workers with those that have decoded"
    assert scheduler.stats.steps == scheduler.stats.prompt_tokens == 0 and scheduler.idle


@pytest.mark.parametrize("seconds", [1e-3, 5e-3, 0.1])
def test_it_ends_in_time(seconds: float) -> None:
    """Beyond a first prompt, two decodes and the same prompt again, whatever they take."""
    scheduler, runner = make(seconds)
    run(scheduler, runner)
    assert runner.now <= max(MAX_SECONDS, seconds * (6 * 64 + 6))
    assert scheduler.stats.prefill_rate == pytest.approx(1 / seconds, rel=0.02)


def test_a_cache_of_one_page_and_a_model_that_generates_nothing() -> None:
    scheduler, runner = make(1e-5, pages=1, generates=False, max_num_seqs=2)
    warm_up(scheduler, runner, 4, lambda: runner.now)
    assert runner.tokens() == [8, 8] and not any(plan.samples for plan in runner.plans)
    assert [row.count for row in runner.plans[0].rows] == [4, 4]
