"""While the images of a service are updated, polls its routers for the share of requests that failed."""

import asyncio
import random
from collections.abc import Callable

from fairlead_operator.observed import ObservedErrors
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober, RequestCounts, RouterUnavailable

PERIOD = 5.0  # seconds


class ErrorPoller:
    """`seen`: failed requests since `follow` began, and the share before. Calls `on_change()` when it changes.

    A process that takes over counts from its own start: it judges later, and not by other requests.
    """

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self.seen: ObservedErrors | None = None
        self._addresses: tuple[str, ...] = ()
        self._last: dict[str, RequestCounts] = {}  # address → its last counts
        self._old: frozenset[str] = frozenset()  # routers that were there at the first poll
        self._task = PeriodicTask(self._poll)

    def follow(self, addresses: tuple[str, ...], *, active: bool) -> None:
        """Poll these routers from now on. Not `active`: stop, and forget."""
        self._addresses = addresses
        if active:
            self._task.start("failed requests")
        else:
            self.stop()

    def stop(self) -> None:
        self._task.stop()
        self.seen, self._last = None, {}

    async def _poll(self) -> float:
        polled = self._addresses
        answers = await asyncio.gather(*(self._prober.fetch_request_counts(address) for address in polled), return_exceptions=True)
        before, first = self.seen or ObservedErrors(), self.seen is None
        requests, errors = before.requests, before.errors
        self._old = frozenset(polled) if first else self._old
        total = RequestCounts(0, 0)
        for address, answer in zip(polled, answers, strict=True):
            if isinstance(answer, RequestCounts):
                # A router that was not there at the first poll counts from its start.
                start = self._last.get(address, answer if address in self._old else RequestCounts(0, 0))
                if answer.requests < start.requests:
                    start = RequestCounts(0, 0)
                requests, errors = requests + answer.requests - start.requests, errors + answer.errors - start.errors
                total = RequestCounts(total.requests + answer.requests, total.errors + answer.errors)
                self._last[address] = answer
            elif isinstance(answer, BaseException) and not isinstance(answer, RouterUnavailable):
                raise answer
        rate = total.errors / total.requests if first and total.requests else before.rate_before
        seen = ObservedErrors(requests, errors, rate)
        if seen != self.seen:
            self.seen = seen
            self._on_change()
        return PERIOD * random.uniform(0.8, 1.2)
