"""Size the prefill beside decodes for a target step time, by a model of the step time that is fitted while serving.

The model is linear in the terms of a step (`Work`). Sarathi-Serve chooses its chunk from a profile made before serving. Here the
coefficients are fitted to recent steps by least squares, and none is negative.
"""

from dataclasses import dataclass
from math import isfinite, sqrt

from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.stats import EngineStats

Work = tuple[float, float, float, float, float]
"""Terms of one step: summed positions of its prefill tokens (their attention), prefill tokens, summed lengths of its decodes (their
attention), decodes, and 1 (reading the weights and launching kernels)."""

_KEEP = 0.98
"""Weight of the past at each step: the last 50 steps count most."""
_MIN_STEPS = 8
"""Steps with prefill, and half of all steps, that the fit needs."""
_SWEEPS = 4
"""Passes of coordinate descent in each step."""
_FIT_EVERY = 8
"""Steps of decodes alone for which one fit is enough. A fit in each of them took a sixth of a step of a tiny model (20 us)."""
_OUTLIER = 3.0
"""A step that took longer than this many times its expected time counts as that long. So one pause of the machine changes little, and the
fit still follows a machine that has become slower within a few steps."""
_MARGIN = 0.9
"""Share of the target that a step is planned for."""
PREFILL_PER_DECODE = 3
"""Time of a step's prefill in decode steps if no target is set and few prompts wait."""
_BACKLOG_STEPS = 12
"""A step prefills this part of the waiting tokens, if that is more. Every step takes a decode step's time besides, so whole chunks serve a
long queue faster: with prompts of 1,000 and 2,000 tokens, short steps alone cost 13 and 18 % of the throughput, this 5 and 2 %."""


def prefill_work(start: int, count: int) -> float:
    """Return the summed positions of `count` tokens from `start`: the cost of their attention."""
    return count * (start + 0.5 * count)


class _Samples:
    """The normal equations of the fit, as sums over weighted samples. Older samples weigh less."""

    def __init__(self) -> None:
        self.count = 0
        self.matrix = [[0.0] * 5 for _ in range(5)]
        self.vector = [0.0] * 5

    def add(self, work: Work, seconds: float, weight: float) -> None:
        self.count += 1
        terms = range(5) if work[1] else range(2, 5)  # without prefill, its two terms are 0 in every sample
        for i in terms:
            row, weighted = self.matrix[i], weight * work[i]
            for j in terms:
                row[j] = _KEEP * row[j] + weighted * work[j]
            self.vector[i] = _KEEP * self.vector[i] + weighted * seconds


class StepTime:
    """The fitted model of the step time.

    Steps with and without prefill have separate sums, so that an hour of decoding does not erase the cost of prefill.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self._decoding = _Samples()
        self._prefilling = _Samples()
        self._not_fitted = 0
        """Steps since the last fit."""
        self.coefficients = [0.0] * 5

    @property
    def is_known(self) -> bool:
        """Whether enough steps were timed."""
        return self._prefilling.count >= _MIN_STEPS and self._decoding.count + self._prefilling.count >= 2 * _MIN_STEPS

    def predict(self, work: Work) -> float:
        """Return the expected seconds of a step."""
        return sum(c * value for c, value in zip(self.coefficients, work, strict=True))

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one more step. A step without a measured time is ignored."""
        if not isfinite(seconds) or seconds <= 0.0:
            return
        if self.is_known:
            seconds = min(seconds, _OUTLIER * max(self.predict(work), 0.1 * self._target))
        samples = self._prefilling if work[1] else self._decoding
        samples.add(work, seconds, 1.0 / max(seconds, self._target) ** 2)
        self._not_fitted += 1
        if work[1] or self._not_fitted >= _FIT_EVERY:
            self._fit()

    def _fit(self) -> None:
        """Improve the coefficients by a few sweeps of coordinate descent. They start from the last fit, so they never jump."""
        self._not_fitted = 0
        first, second, fit = self._decoding, self._prefilling, self.coefficients
        rows = [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(first.matrix, second.matrix, strict=True)]
        sums = [x + y for x, y in zip(first.vector, second.vector, strict=True)]
        for _ in range(_SWEEPS):
            for i in (4, 1, 0, 2, 3):
                row = rows[i]
                if row[i] > 0.0:
                    predicted = row[0] * fit[0] + row[1] * fit[1] + row[2] * fit[2] + row[3] * fit[3] + row[4] * fit[4]
                    fit[i] = max(fit[i] + (sums[i] - predicted) / row[i], 0.0)


def least_chunk(config: SchedulerConfig, page_size: int) -> int:
    """Return the prefill tokens of a step beside any decodes: an eighth of a chunk in whole pages, at least one page.

    With one page, a prompt of 8,192 tokens took 512 steps once as many requests decoded as a chunk has tokens.
    """
    return max(config.chunked_prefill_size // 8 // page_size * page_size, page_size)


@dataclass(slots=True)
class PrefillBudget:
    """Prefill of one step: as many tokens as its seconds allow, at least `floor` and at most `limit`."""

    seconds: float
    """Seconds left."""
    floor: int
    """Tokens."""
    limit: int
    """Tokens."""
    seconds_per_work: float
    """Seconds for each unit of `prefill_work`."""
    seconds_per_token: float

    def count_fitting(self, start: int) -> int:
        """Return how many tokens from position `start` on fit into the seconds left."""
        if self.seconds <= 0.0:
            return 0
        linear = self.seconds_per_work * start + self.seconds_per_token
        root = linear + sqrt(linear * linear + 2.0 * self.seconds_per_work * self.seconds)
        return self.limit if root <= 0.0 else int(min(2.0 * self.seconds / root, self.limit))

    def spend(self, start: int, count: int) -> None:
        """Charge `count` tokens from position `start` on."""
        self.seconds -= self.seconds_per_work * prefill_work(start, count) + self.seconds_per_token * count


class ChunkSizer:
    """Chooses the prefill of each step that keeps decodes at an ITL target (`--itl-target-ms`).

    A chunk is between an eighth of `chunked_prefill_size` and four times it, so prompts progress even if the decodes alone miss the target.
    It is at most twice the largest recent step, because the fit is uncertain beyond the measured sizes. The fixed size holds in a step
    without decodes, and until enough steps were timed. A chunk depends on the fit alone and not on the last chunk, so it cannot oscillate.

    With `chunks_grow` off, chunks only shrink: a step has at most the tokens that the fixed size leaves beside the decodes. Its prefill
    takes at most `PREFILL_PER_DECODE` decode steps, or is a twelfth of the waiting tokens. So streams are smooth without a target.
    """

    def __init__(self, config: SchedulerConfig, page_size: int) -> None:
        self._target = config.itl_target_ms / 1000
        self._fixed = config.chunked_prefill_size
        self._floor = least_chunk(config, page_size)
        self._grows = config.chunks_grow
        self._limit = max(min(4 * self._fixed if self._grows else self._fixed, config.max_prefill_tokens), self._floor)
        self._largest_step = 0.0
        """Prefill tokens of the largest recent step; decays."""
        self.time = StepTime(self._target)

    def prefill_budget(self, decodes: int, context: int, backlog: int, stats: EngineStats) -> PrefillBudget | None:
        """Return the prefill of a step with `decodes` decodes, whose lengths sum to `context`. None: the fixed size holds.

        `backlog`: prompt tokens that wait. `stats`: with `chunks_grow` off, its speed is used until the fit is known.
        """
        if not decodes:
            return None
        if self.time.is_known:
            decode = self.time.predict((0.0, 0.0, context, decodes, 1.0))
            work, token = self.time.coefficients[:2]
        elif self._grows or stats.prefill_rate <= 0.0:
            return None
        else:
            decode = stats.decode_seconds if isfinite(stats.decode_seconds) else 0.0
            work, token = 0.0, 1.0 / stats.prefill_rate
        limit, seconds = min(self._limit, max(self._fixed, int(2 * self._largest_step))), _MARGIN * self._target - decode
        if not self._grows:
            limit -= decodes
            seconds = min(seconds, max(PREFILL_PER_DECODE * decode, token * backlog / _BACKLOG_STEPS))
        return PrefillBudget(seconds, self._floor, limit, work, token)

    def observe(self, work: Work, seconds: float) -> None:
        """Learn from one step."""
        if work[1]:
            self._largest_step = max(0.99 * self._largest_step, work[1])
        self.time.observe(work, seconds)
