"""How long a step takes, learnt from the steps that were run; and how much prefill fits beside the decodes within a target time.

A step's time is taken to be linear in what it does, `Work`: attention of the prefill, its tokens, attention of the decodes, their
number, and one (the weights are read, the kernels launched). Sarathi-Serve picks its chunk from a profile made beforehand; here the
coefficients are fitted while serving: least squares over recent steps, none negative.
"""

from dataclasses import dataclass
from math import isfinite, sqrt

from fairlead_worker.scheduler.config import SchedulerConfig

Work = tuple[float, float, float, float, float]
"""Of one step: sum over prefilled tokens of their position, prefilled tokens, sum of the decodes' lengths, decodes, 1."""

_KEEP = 0.98
"""Weight of the past at each step: the last 50 count most."""
_ENOUGH = 8
"""Steps of each kind before the fit is used."""
_SWEEPS = 4
_OUTLIER = 3.0
"""A step that took more than this many times what was expected counts as so many: one pause of the machine is no trend, and a machine
that has become slower is followed within a few steps."""
_MARGIN = 0.9
"""Share of the target that a step is planned for."""


def prefill_work(start: int, count: int) -> float:
    """Positions of `count` tokens from `start`, summed: what their attention costs."""
    return count * (start + 0.5 * count)


class _Samples:
    """Sums over weighted, fading samples: the normal equations."""

    __slots__ = ("count", "matrix", "vector")

    def __init__(self) -> None:
        self.count = 0
        self.matrix = [[0.0] * 5 for _ in range(5)]
        self.vector = [0.0] * 5

    def add(self, work: Work, seconds: float, weight: float) -> None:
        self.count += 1
        for i, value in enumerate(work):
            row, weighted = self.matrix[i], weight * value
            for j in range(5):
                row[j] = _KEEP * row[j] + weighted * work[j]
            self.vector[i] = _KEEP * self.vector[i] + weighted * seconds


class StepTime:
    """The fit. Steps with prefill and those without are kept apart, so that an hour of decoding does not wash out what prefill costs."""

    __slots__ = ("_decoding", "_prefilling", "_target", "coefficients")

    def __init__(self, target: float) -> None:
        self._target = target
        self._decoding = _Samples()
        self._prefilling = _Samples()
        self.coefficients = [0.0] * 5

    @property
    def known(self) -> bool:
        return self._prefilling.count >= _ENOUGH and self._decoding.count + self._prefilling.count >= 2 * _ENOUGH

    def expected(self, work: Work) -> float:
        """Seconds."""
        return sum(c * value for c, value in zip(self.coefficients, work, strict=True))

    def observe(self, work: Work, seconds: float) -> None:
        """Add a step that took `seconds`. Steps without a measured time are ignored."""
        if not isfinite(seconds) or seconds <= 0.0:
            return
        if self.known:
            seconds = min(seconds, _OUTLIER * max(self.expected(work), 0.1 * self._target))
        samples = self._prefilling if work[1] else self._decoding
        samples.add(work, seconds, 1.0 / max(seconds, self._target) ** 2)
        self._fit()

    def _fit(self) -> None:
        """A few sweeps of coordinate descent from where it was, each coefficient kept at or above zero: it moves, and never jumps."""
        first, second, found = self._decoding, self._prefilling, self.coefficients
        rows = [[x + y for x, y in zip(a, b, strict=True)] for a, b in zip(first.matrix, second.matrix, strict=True)]
        sums = [x + y for x, y in zip(first.vector, second.vector, strict=True)]
        for _ in range(_SWEEPS):
            for i in (4, 1, 0, 2, 3):
                row = rows[i]
                if row[i] > 0.0:
                    rest = row[0] * found[0] + row[1] * found[1] + row[2] * found[2] + row[3] * found[3] + row[4] * found[4]
                    found[i] = max(found[i] + (sums[i] - rest) / row[i], 0.0)


@dataclass(slots=True)
class PrefillBudget:
    """Prefill of one step in seconds, and in tokens whatever the seconds say: at least `floor`, at most `limit`."""

    seconds: float
    floor: int
    limit: int
    by_work: float
    """Seconds for each unit of `prefill_work`."""
    by_token: float

    def tokens(self, start: int) -> int:
        """Tokens from position `start` on that take the seconds left."""
        if self.seconds <= 0.0:
            return 0
        linear = self.by_work * start + self.by_token
        root = linear + sqrt(linear * linear + 2.0 * self.by_work * self.seconds)
        return self.limit if root <= 0.0 else int(min(2.0 * self.seconds / root, self.limit))

    def spend(self, start: int, count: int) -> None:
        self.seconds -= self.by_work * prefill_work(start, count) + self.by_token * count


class ChunkSizer:
    """The prefill of each step that keeps decodes at an ITL target (`--itl-target-ms`).

    It stays within an eighth of `chunked_prefill_size` and four times it: prompts always get on, even where the decodes alone miss the
    target, and no step is ever huge. It grows to twice the largest recent step at most: the fit is not trusted far from what was seen.
    Without decodes no request is delayed, and before enough steps were timed nothing is known: then there is no budget, and the
    fixed sizes hold. A chunk follows from the fit alone and not from the last chunk, so there is no loop that could swing.

    Where `chunks_grow` is off, a step has what the fixed size leaves beside the decodes at most: only a slow step is made shorter.
    """

    __slots__ = ("_fixed", "_floor", "_grows", "_limit", "_seen", "_target", "time")

    def __init__(self, config: SchedulerConfig, page_size: int) -> None:
        self._target = config.itl_target_ms / 1000
        self._fixed = config.chunked_prefill_size
        self._floor = max(self._fixed // 8 // page_size * page_size, page_size)
        self._grows = config.chunks_grow
        self._limit = max(min(4 * self._fixed if self._grows else self._fixed, config.max_prefill_tokens), self._floor)
        self._seen = 0.0
        self.time = StepTime(self._target)

    def prefill_budget(self, decodes: int, context: int, rate: float = 0.0) -> PrefillBudget | None:
        """For a step with `decodes` decodes, whose lengths sum to `context`; None: the fixed size holds.

        rate: prompt tokens a second, as rehearsed. Where only slow steps are to change, it stands in until the fit is known. 0: unknown.
        """
        if not decodes:
            return None
        limit = min(self._limit, max(self._fixed, int(2 * self._seen))) - (0 if self._grows else decodes)
        if not self.time.known:
            return None if self._grows or rate <= 0.0 else PrefillBudget(_MARGIN * self._target, self._floor, limit, 0.0, 1.0 / rate)
        seconds = _MARGIN * self._target - self.time.expected((0.0, 0.0, context, decodes, 1.0))
        by_work, by_token = self.time.coefficients[:2]
        return PrefillBudget(seconds, self._floor, limit, by_work, by_token)

    def observe(self, work: Work, seconds: float) -> None:
        if work[1]:
            self._seen = max(0.99 * self._seen, work[1])
        self.time.observe(work, seconds)
