"""Polls the workers of a service that run and are not ready for their loading progress: a few, every five seconds."""

import asyncio
import random
from collections.abc import Callable, Mapping

from fairlead_operator.observed import ObservedLoading
from fairlead_operator.polling.periodic import PeriodicTask
from fairlead_operator.polling.prober import Prober

PERIOD = 5.0  # seconds


class LoadingPoller:
    """`seen`: the last answers by pod. Calls `on_change()` when one changes, which is rare: the figures are coarse."""

    def __init__(self, prober: Prober, on_change: Callable[[], None]) -> None:
        self._prober, self._on_change = prober, on_change
        self.seen: dict[str, ObservedLoading] = {}
        self._addresses: Mapping[str, str] = {}
        self._task = PeriodicTask(self._poll)

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Poll these pods (name → host:port) from now on; none: stop."""
        self._addresses = addresses
        if addresses:
            self._task.start("loading")
        else:
            self.stop()

    def stop(self) -> None:
        self._task.stop()
        self.seen = {}

    async def _poll(self) -> float:
        polled = dict(self._addresses)
        answers = await asyncio.gather(*(self._prober.fetch_loading(address) for address in polled.values()))
        # A pod that does not answer, for example while it imports, keeps its last progress.
        seen = {pod: answer or self.seen.get(pod) for pod, answer in zip(polled, answers, strict=True)}
        known = {pod: load for pod, load in seen.items() if load is not None}
        if known != self.seen:
            self.seen = known
            self._on_change()
        return PERIOD * random.uniform(0.8, 1.2)
