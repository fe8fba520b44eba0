"""While a canary is analyzed, polls every ready router for the results of both sides, and sums their counts."""

import asyncio
import random
from collections.abc import Callable

from fairlead_common.canary_split import Split, SplitReport
from fairlead_operator.observed import ObservedCanary
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober, RouterUnavailable

PERIOD = 5.0  # seconds


class CanaryPoller:
    """`seen` is the last sum. Calls `on_change()` when it changes."""

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self.seen: ObservedCanary | None = None
        self._addresses: tuple[str, ...] = ()
        self._split = Split()
        self._task = PeriodicTask(self._poll)

    def follow(self, addresses: tuple[str, ...], split: Split) -> None:
        """Poll the routers at `addresses` for this canary's results; no addresses: stop."""
        if (split.revision, split.trial) != (self._split.revision, self._split.trial) or not addresses:
            self.stop()
        self._addresses, self._split = addresses, split
        if addresses and split.revision:
            self._task.start(f"canary {split.revision}")

    def stop(self) -> None:
        self._task.stop()
        self.seen = None

    async def _poll(self) -> float:
        answers = await asyncio.gather(*(self._prober.fetch_split(address) for address in self._addresses), return_exceptions=True)
        total, routers = SplitReport(self._split.revision, trial=self._split.trial), 0
        for answer in answers:
            if isinstance(answer, SplitReport) and answer.describes(self._split):
                total.include(answer)
                routers += 1
            elif isinstance(answer, BaseException) and not isinstance(answer, RouterUnavailable):
                raise answer
        seen = ObservedCanary(total, routers)
        if routers and seen != self.seen:  # an unavailable router has no new results
            self.seen = seen
            self._on_change()
        return PERIOD * random.uniform(0.8, 1.2)
