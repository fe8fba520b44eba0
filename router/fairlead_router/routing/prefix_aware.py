"""PrefixAware: the worker with the earliest expected first token, by the prefix index and the workers' loads."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from fairlead_index.mirror.workers import FleetReader
from fairlead_index.reader import IndexReader
from fairlead_index.redis.backoff import LogLimit
from fairlead_router.fleet.trust import Trust
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.metrics import Metrics
from fairlead_router.routing.chooser import Chooser, Prefixes, Ranking
from fairlead_router.routing.policies import Choice, RoutingRequest, Tried
from fairlead_router.routing.prediction_audit import PredictionAudit
from fairlead_router.routing.prefix_lookup import IndexConfig, PrefixLookup
from fairlead_router.supervision import stop_tasks, supervise

logger = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
"""Interval of checking whether Redis answers."""
_NO_INDEX = Prefixes({}, "local")


class PrefixAware:
    """Policy by the prefix index.

    Prefixes come from this router's copy of the index (`mirror`), or from Redis in one round trip (`remote`). Loads and reservations are
    in this router's memory in both modes, so one function scores.
    """

    def __init__(
        self,
        table: WorkerTable,
        index: IndexConfig | None,
        metrics: Metrics,
        refresh_discovery: Callable[[], None] = lambda: None,
        keep_candidates: bool = False,
    ) -> None:
        """`refresh_discovery`: requests an early discovery query. `keep_candidates`: as in `Chooser`."""
        self._table, self._metrics = table, metrics
        self.trust = Trust(table, metrics.ignored_records, refresh_discovery)
        self._fleet = FleetReader(index.redis, index.namespace, trusts=self.trust) if index is not None else None
        self._chooser = Chooser(table, self._fleet, keep_candidates)
        self.lookup: PrefixLookup | None = None
        self._audit: PredictionAudit | None = None
        if index is not None and self._fleet is not None:
            self.lookup = PrefixLookup(table, index, self._fleet, self._chooser, self.trust, metrics.task_failures)
            self._audit = PredictionAudit(metrics, self.lookup.held, self.lookup.reader.recall)
        self._log_limit, self._is_logged = LogLimit(), False
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.lookup is not None:
            self._table.on_incarnation = self.lookup.recheck_trust
            self.lookup.start()
            self._watching = supervise("index watch", self._watch, self._metrics.task_failures)

    @property
    def index(self) -> str:
        """State of the index: `off`, `ok` or `unavailable`."""
        if self._fleet is None:
            return "off"
        return "unavailable" if self._fleet.was_tried and not self._fleet.is_fresh else "ok"

    @property
    def index_reason(self) -> str:
        """Why the index is unavailable, in plain text."""
        return self._fleet.reason if self._fleet is not None and self.index == "unavailable" else ""

    @property
    def read_mode(self) -> str:
        """How the index is read now: `mirror`, `remote`, or empty without an index."""
        if self.lookup is None:
            return ""
        return "mirror" if self.lookup.has_copy else "remote"

    async def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        prefixes = await self._find(request, tried)
        if not prefixes.is_current and self.lookup is not None:
            self._metrics.index_unavailable.inc()
        return self._chooser.choose(request, tried, prefixes)

    async def rank(self, request: RoutingRequest, reader: IndexReader | None = None) -> Ranking:
        """Return the workers that `choose` compares now, best first, without a reservation. `reader`: None for that of routing."""
        return self._chooser.rank(request, await self._find(request, (), reader))

    async def _find(self, request: RoutingRequest, tried: Tried, reader: IndexReader | None = None) -> Prefixes:
        return await self.lookup.find(request, tried, reader) if self.lookup is not None else _NO_INDEX

    @property
    def prefers_copy(self) -> bool:
        """Whether the copy is as good as Redis, or better."""
        return self.lookup is not None and self.lookup.prefers_copy

    def predict(self, request: RoutingRequest) -> Mapping[str, int]:
        """Return the prompt's tokens that workers hold, by address, as the copy has it now; empty without one."""
        if self.lookup is None or not self.lookup.prefers_copy:
            return {}
        return self._chooser.known(request, self.lookup.find_in_copy(request))

    def tokens_ahead(self, address: str) -> float:
        """Return the prompt tokens before a new prompt at the worker, as all routers together know it; 0: not known."""
        return self._fleet.tokens_ahead(address) if self._fleet is not None else 0.0

    def unique_shares(self) -> dict[str, float]:
        """Return the share of each worker's blocks that no other worker holds, by address; empty without a copy."""
        return self.lookup.unique_shares() if self.lookup is not None else {}

    def release(self, choice: Choice) -> None:
        if choice.reservation:
            self._chooser.release(choice.reservation)

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        if self._audit is not None:
            self._audit.record_answer(request, choice, cached)

    async def _watch(self) -> None:
        """Track whether Redis answers, also when no request queries it."""
        was_unavailable = False
        while True:
            was_unavailable = self._report_change(was_unavailable)
            await asyncio.sleep(WATCH_SECONDS)

    def _report_change(self, was_unavailable: bool) -> bool:
        """Return whether the index is unavailable. A change is logged at most once a minute: each reply of Redis may cause one."""
        is_unavailable = self.index == "unavailable"
        if is_unavailable == was_unavailable:
            return is_unavailable
        self._metrics.index_up.set(0 if is_unavailable else 1)
        if is_unavailable and self._log_limit.may_log():
            self._is_logged = True
            fallback = "its last snapshot" if self.read_mode == "mirror" else "what this router has sent"
            logger.warning("the index is unavailable, routing by %s and the workers' own loads: %s", fallback, self.index_reason)
        elif not is_unavailable and self._is_logged:
            self._is_logged = False
            logger.info("the index answers again")
        return is_unavailable

    async def close(self) -> None:
        await stop_tasks(self._watching)
        if self._audit is not None:
            await self._audit.close()
        if self.lookup is not None:
            await self.lookup.close()
