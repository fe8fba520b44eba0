"""No step exceeds `StepLimits`, for any configuration and arrivals. The memory profile relies on it."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.limits import StepLimits, limit_steps
from fairlead_worker.scheduler.plan import StepResult
from fairlead_worker.scheduler.scheduler import Scheduler

CONFIGS = st.builds(
    SchedulerConfig,
    max_model_len=st.just(600),
    max_num_seqs=st.integers(1, 12),
    chunked_prefill_size=st.sampled_from((0, 16, 37, 64, 400)),
    idle_prefill_chunks=st.sampled_from((1, 1, 3)),
    max_prefill_tokens=st.sampled_from((8, 50, 200, 1000)),
    enable_mixed_chunk=st.booleans(),
    prefill_max_requests=st.sampled_from((0, 0, 1, 3)),
    speculative_method=st.sampled_from(("none", "ngram")),
    speculative_num_tokens=st.integers(1, 5),
)
ARRIVALS = st.lists(st.tuples(st.integers(1, 560), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=20)


def largest_step(config: SchedulerConfig, page_size: int, arrivals: list[tuple[int, int, int]]) -> tuple[int, int]:
    """(tokens, rows that sample) of the largest of all steps that serve `arrivals`: prompt, output, steps to wait."""
    scheduler = Scheduler(config, PrefixCache(PagePool(4000 // page_size, page_size), 2 * page_size, extend))
    most = samples = 0
    for number, (prompt, output, wait) in enumerate(arrivals):
        tokens = array("I", [(number * 7 + place) % 5 + 1 for place in range(prompt)])
        assert scheduler.submit(Submit(str(number), tokens.tobytes(), Sampling(output, 0, ignore_eos=True), 1)) is None
        for _ in range(wait if number + 1 < len(arrivals) else 10_000):
            plan = scheduler.plan()
            if not plan:
                break
            most = max(most, sum(row.count for row in plan.rows))
            samples = max(samples, sum(1 + len(row.draft) for row in plan.rows if row.samples))
            scheduler.advance(plan, StepResult([[1] * (1 + row.num_drafts) for row in plan.rows if row.samples], seconds=1e-4))
    assert scheduler.idle
    return most, samples


@settings(max_examples=60, deadline=None)
@given(CONFIGS, ARRIVALS, st.sampled_from((1, 4, 16)))
def test_no_step_is_larger_than_its_limits(config: SchedulerConfig, arrivals: list[tuple[int, int, int]], page_size: int) -> None:
    most, samples = largest_step(config, page_size, arrivals)
    assert most <= StepLimits.from_config(config, page_size).tokens
    assert samples <= StepLimits.from_config(config, page_size).decode, "rows whose logits are held at once"


@settings(max_examples=60, deadline=None)
@given(CONFIGS, ARRIVALS, st.sampled_from((1, 4, 16)), st.integers(40, 500))
def test_a_configuration_for_less_memory_keeps_every_step_within_it(
    config: SchedulerConfig, arrivals: list[tuple[int, int, int]], page_size: int, tokens: int
) -> None:
    kept = limit_steps(config, tokens, page_size)
    assert StepLimits.from_config(kept, page_size).tokens <= tokens
    assert largest_step(kept, page_size, arrivals)[0] <= tokens
    assert limit_steps(kept, tokens, page_size) == kept


def test_a_configuration_that_fits_is_unchanged() -> None:
    config = SchedulerConfig(max_model_len=4096)
    assert limit_steps(config, 512 + 256, 16) is config
    assert limit_steps(config, 512 + 255, 16) != config


def test_idle_steps_are_reduced_first() -> None:
    config = SchedulerConfig(max_model_len=4096, max_num_seqs=1024, idle_prefill_chunks=5)
    for tokens, chunks in ((5 * 512 + 1024, 5), (5 * 512 + 1023, 4), (512 + 1024, 1)):
        kept = limit_steps(config, tokens, 16)
        assert (kept.idle_prefill_chunks, kept.chunked_prefill_size, kept.max_num_seqs) == (chunks, 512, 1024)
    assert limit_steps(config, 512 + 1023, 16).max_num_seqs < 1024


@pytest.mark.parametrize(
    ("settings", "prefill"),
    [({}, 512), ({"chunked_prefill_size": 0}, 40_000), ({"itl_target_ms": 30.0}, 8192), ({"max_prefill_tokens": 8}, 16)],
)
def test_prompt_tokens_by_configuration(settings: dict[str, float], prefill: int) -> None:
    assert StepLimits.from_config(SchedulerConfig(max_model_len=40_000, **settings), 16) == StepLimits(prefill, 256, 40_000)
