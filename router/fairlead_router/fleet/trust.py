"""Validation of the index's records: discovery authorises addresses, and each worker reports its own incarnation.

A client with write access to Redis can forge a record of any address. A record counts only while discovery lists its address and the
worker there reports the record's incarnation in this router's own health check.
"""

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

from prometheus_client import Counter

from fairlead_router.fleet.workers import NOT_CHECKED, WorkerTable

logger = logging.getLogger(__name__)

UNKNOWN_ADDRESS: Final = "unknown_address"
OTHER_INCARNATION: Final = "other_incarnation"
MAX_REMEMBERED: Final = 128
"""Most ignored records that are remembered. Further ones are counted, but neither shown nor logged."""
REMEMBERED_SECONDS: Final = 60.0
"""Seconds after its last occurrence that a record is forgotten."""


class _Ignored:
    __slots__ = ("count", "incarnation", "last", "since")

    def __init__(self, now: float) -> None:
        self.since = self.last = now
        self.count, self.incarnation = 0, ""


class Trust:
    """Callable with each record's address and incarnation. False: the record is ignored, counted and remembered."""

    def __init__(
        self, table: WorkerTable, ignored: Counter, refresh_discovery: Callable[[], None], clock: Callable[[], float] = monotonic
    ) -> None:
        """`ignored`: counter of records by reason. `refresh_discovery`: requests an early discovery query: a new pod may be missing."""
        self._table, self._refresh_discovery, self._clock = table, refresh_discovery, clock
        self._counters = {reason: ignored.labels(reason) for reason in (UNKNOWN_ADDRESS, OTHER_INCARNATION)}
        self._seen: dict[tuple[str, str], _Ignored] = {}

    def __call__(self, address: str, incarnation: str) -> bool:
        if self._is_trusted(address, incarnation):
            if self._seen:  # else a crash soon after the start would count as ignored since that start
                for reason in self._counters:
                    self._seen.pop((address, reason), None)
            return True
        worker = self._table.get(address)
        if worker is None:
            self._refresh_discovery()
            self._ignore(address, UNKNOWN_ADDRESS, incarnation)
        elif worker.reason != NOT_CHECKED:  # else a router that has just started would report its own workers
            worker.request_check()
            self._ignore(address, OTHER_INCARNATION, incarnation)
        return False

    def recent(self) -> list[dict[str, Any]]:
        """Return the recently ignored records for `/fairlead/workers`, with `seconds` since each first occurred.

        Records that are trusted by now are left out: discovery or the health check was merely later than the index.
        """
        now = self._clock()
        self._drop_expired(now)
        return [
            {
                "address": address,
                "reason": reason,
                "incarnation": record.incarnation,
                "count": record.count,
                "seconds": round(now - record.since, 1),
            }
            for (address, reason), record in self._seen.items()
            if not self._is_trusted(address, record.incarnation)
        ]

    def _is_trusted(self, address: str, incarnation: str) -> bool:
        worker = self._table.get(address)
        return worker is not None and bool(incarnation) and worker.incarnation == incarnation

    def _ignore(self, address: str, reason: str, incarnation: str) -> None:
        self._counters[reason].inc()
        address, now = address[:200], self._clock()
        record = self._seen.get((address, reason))
        if record is None:
            if len(self._seen) >= MAX_REMEMBERED:
                self._drop_expired(now)
                if len(self._seen) >= MAX_REMEMBERED:
                    return
            record = self._seen[address, reason] = _Ignored(now)
            why = (
                "discovery does not list that address"
                if reason == UNKNOWN_ADDRESS
                else "the worker there does not report that incarnation: it has joined again, or the record is forged"
            )
            logger.warning("the index's record of %r (incarnation %s) is ignored: %s", address, incarnation or "none", why)
        record.count, record.last, record.incarnation = record.count + 1, now, incarnation

    def _drop_expired(self, now: float) -> None:
        self._seen = {key: record for key, record in self._seen.items() if now - record.last < REMEMBERED_SECONDS}
