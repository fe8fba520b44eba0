"""While a canary is judged, every ready router is asked now and then how both sides fare; their counts are added up."""

import asyncio
import random
from collections.abc import Callable

from fairlead_common.canary_split import Split, SplitReport
from fairlead_operator.observed import CanarySeen
from fairlead_operator.polling.periodic import Repeated
from fairlead_operator.polling.prober import Prober, RouterSilent

PERIOD = 5.0  # seconds


class CanaryWatch:
    """`seen` is the last sum; `changed()` is called when another one came."""

    def __init__(self, prober: Prober, changed: Callable[[], None]) -> None:
        self._prober, self._changed = prober, changed
        self.seen: CanarySeen | None = None
        self._addresses: tuple[str, ...] = ()
        self._split = Split()
        self._asking = Repeated(self._ask)

    def follow(self, addresses: tuple[str, ...], split: Split) -> None:
        """Ask the routers at `addresses` how this canary fares; none: stop."""
        if (split.revision, split.trial) != (self._split.revision, self._split.trial) or not addresses:
            self.stop()
        self._addresses, self._split = addresses, split
        if addresses and split.revision:
            self._asking.start(f"canary {split.revision}")

    def stop(self) -> None:
        self._asking.stop()
        self.seen = None

    async def _ask(self) -> float:
        answers = await asyncio.gather(*(self._prober.split(address) for address in self._addresses), return_exceptions=True)
        total, routers = SplitReport(self._split.revision, trial=self._split.trial), 0
        for answer in answers:
            if isinstance(answer, SplitReport) and answer.describes(self._split):
                total.include(answer)
                routers += 1
            elif isinstance(answer, BaseException) and not isinstance(answer, RouterSilent):
                raise answer
        seen = CanarySeen(total, routers)
        if routers and seen != self.seen:  # of those that are silent nothing new is known
            self.seen = seen
            self._changed()
        return PERIOD * random.uniform(0.8, 1.2)
