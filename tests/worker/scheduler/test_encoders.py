"""An encoder's texts: each whole in one step, several within the budget, and nothing of them cached or shown to the index."""

from array import array

from fairlead_index.hashing import extend, token_bytes
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import Sampling, Submit
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import StepResult
from fairlead_worker.scheduler.scheduler import Scheduler


def test_whole_texts_within_the_budget_and_longer_ones_alone() -> None:
    config = SchedulerConfig(
        max_model_len=500, chunked_prefill_size=64, max_prefill_tokens=64, generates=False, keeps_kv=False, dedupe_tokens=0, promise_limit=0
    )
    scheduler = Scheduler(config, PrefixCache(PagePool(64, 16), 16, extend))
    lengths = (30, 30, 30, 200, 20, 44, 500)
    for number, length in enumerate(lengths):
        submit = Submit(str(number), token_bytes(array("I", [7]) * length), Sampling(max_tokens=1), 1, pooling="mean", second=number)
        assert scheduler.submit(submit) is None
    refused = scheduler.submit(Submit("long", token_bytes(array("I", [7]) * 501), Sampling(max_tokens=1), 1, pooling="cls"))
    assert refused is not None and "the longest here is 500" in refused.error
    steps, finished = [], 0
    while plan := scheduler.plan():
        for row in plan.rows:
            assert (row.start, row.count, row.request.submit.second) == (0, len(row.request.tokens), int(row.request.id))
        steps.append(sorted(row.count for row in plan.rows))
        outputs = scheduler.advance(plan, StepResult([], pooled={row.request.id: b"vector" for row in plan.rows}))
        finished += len(outputs.full)
        assert all(output.embedding == b"vector" and output.cached_tokens == 0 for output in outputs.full)
    assert finished == len(lengths) and all(sum(step) <= 64 or len(step) == 1 for step in steps), steps
    assert len(steps) < len(lengths), "short texts share a step"
    assert not scheduler.cache.drain_events() and scheduler.idle and scheduler.load().pages_free == 64
