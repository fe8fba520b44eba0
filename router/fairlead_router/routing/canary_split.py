"""Canary routing: the side of each conversation, fallback to the other side, and counters of both sides.

Workers report the revision whose canary they are, and the file holds that revision's weight. A canary that is up before its weight is
known therefore gets no requests, and one whose weight is gone gets requests only if no other worker is left.
"""

import asyncio
import math
import random
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from time import monotonic

import xxhash
from prometheus_client import Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from fairlead_common.canary_split import Side, Split, SplitReport
from fairlead_router.file_follower import json_file
from fairlead_router.fleet.workers import NOT_CHECKED, Worker, WorkerTable
from fairlead_router.routing.policies import Choice, Policy, RoutingRequest, Tried
from fairlead_router.supervision import stop_tasks, supervise

QUANTILES = (0.5, 0.9)
TOLERANCE = 8
"""Requests, beside four standard deviations, by which a side may exceed its share before new requests go to the other side. One long
conversation, or one prompt sent repeatedly, therefore cannot give a canary all requests or none."""


def belongs_to_canary(conversation: int, split: Split) -> bool:
    """Return whether a conversation belongs to the canary. All routers agree, and a growing weight moves none away from the canary."""
    point = xxhash.xxh3_64_intdigest(conversation.to_bytes(8, "little") + split.revision.encode())
    return point < split.weight / 100 * 2.0**64


class CanaryPolicy:
    """Policy that chooses a side, and delegates to another policy within it."""

    def __init__(self, table: WorkerTable, inner: Policy, file: Path, failures: Counter) -> None:
        """`file`: the split. `failures`: counter of task failures, by name."""
        self._table, self._inner, self._failures = table, inner, failures
        self._report = SplitReport()
        self._sent = self._sent_to_canary = 0
        self._following: asyncio.Task[None] | None = None
        self._file = json_file("split", file, Split(), self._apply)

    def start(self) -> None:
        self._inner.start()
        self._following = supervise("split file", self._file.follow, self._failures)

    async def close(self) -> None:
        await stop_tasks(self._following)
        await self._inner.close()

    def report(self) -> SplitReport:
        """Return the counters of both sides since this canary appeared."""
        return self._report

    def canary_for(self, conversation: int) -> str:
        """Return the revision whose canary this conversation belongs to; empty: none."""
        split = self._file.content
        return split.revision if split.revision and belongs_to_canary(conversation, split) else ""

    async def choose(self, request: RoutingRequest, tried: Tried) -> Choice | None:
        split, workers = self._file.content, list(self._table)
        if not split.revision and not any(worker.canary for worker in workers):
            return await self._inner.choose(request, tried)
        canary = {worker for worker in workers if worker.canary and worker.canary == split.revision}
        stable = _stable(workers)
        for side in self._ordered_sides(split, canary, stable, request, tried):
            if choice := await self._choose_within(side, request, tried):
                return choice
        return await self._inner.choose(request, tried)  # the canary's weight must never cause a 503

    def release(self, choice: Choice) -> None:
        self._inner.release(choice)

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        self._inner.record_answer(request, choice, cached)

    # Counters of both sides

    def record_head(self, worker: Worker, status: int, sent: float) -> None:
        """Record the head of an answer whose request was sent at `sent` (monotonic seconds)."""
        if (side := self._side_of(worker)) is not None:
            side.requests += 1
            side.errors += status >= 500
            if 200 <= status < 300:
                side.ttft.add(monotonic() - sent)

    def record_failure(self, worker: Worker) -> None:
        """Record an attempt without an answer."""
        if (side := self._side_of(worker)) is not None:
            side.requests += 1
            side.errors += 1

    def record_truncated(self, worker: Worker) -> None:
        """Record a truncated answer."""
        if (side := self._side_of(worker)) is not None:
            side.errors += 1

    def can_retry_on_stable(self, worker: Worker, request: RoutingRequest, tried: Tried) -> bool:
        """Return whether a 5xx of this worker is retried: a canary's is, while the stable side has a usable worker."""
        return bool(worker.canary) and _has_usable(_stable(self._table), request, tried)

    def _apply(self, split: Split) -> None:
        """Reset the counters for a new canary. A new weight of the same canary resets only the shares."""
        if (split.revision, split.trial) != (self._report.revision, self._report.trial):
            self._report = SplitReport(split.revision, trial=split.trial)
        if split.weight != self._report.weight:
            self._report.weight = split.weight
            self._sent = self._sent_to_canary = 0

    def _side_of(self, worker: Worker) -> Side | None:
        if not self._report.revision or worker.canary not in ("", self._report.revision):
            return None
        return self._report.canary if worker.canary else self._report.stable

    # Choosing

    def _ordered_sides(
        self, split: Split, canary: set[Worker], stable: set[Worker], request: RoutingRequest, tried: Tried
    ) -> Iterator[set[Worker]]:
        """Yield the sides with usable workers, the preferred one first."""
        usable = [side for side in (canary, stable) if _has_usable(side, request, tried)]
        if len(usable) < 2:
            yield from usable
            return
        # A retry goes to the stable side, even if the worker that failed is gone or has restarted.
        to_canary = not request.is_retry and self._is_for_canary(request.conversation or random.getrandbits(64), split)
        if not request.is_retry:
            self._sent += 1
            self._sent_to_canary += to_canary
        yield from (canary, stable) if to_canary else (stable, canary)

    def _is_for_canary(self, conversation: int, split: Split) -> bool:
        share = split.weight / 100
        ahead = self._sent_to_canary - share * self._sent
        leeway = TOLERANCE + 4 * math.sqrt(self._sent * share * (1 - share))
        if abs(ahead) > leeway and 0 < share < 1:
            return ahead < 0
        return belongs_to_canary(conversation, split)

    async def _choose_within(self, side: Collection[Worker], request: RoutingRequest, tried: Tried) -> Choice | None:
        excluded = {(worker.address, worker.generation) for worker in self._table if worker not in side} | set(tried)
        while (choice := await self._inner.choose(request, excluded)) is not None:
            if choice.worker in side:
                return choice
            self._inner.release(choice)  # discovery added this worker meanwhile, so it was not excluded above
            excluded.add((choice.worker.address, choice.worker.generation))
        return None


def _stable(workers: Iterable[Worker]) -> set[Worker]:
    """Return the workers of the stable side. One without a health check may be a canary."""
    return {worker for worker in workers if not worker.canary and worker.reason != NOT_CHECKED}


def _has_usable(side: Collection[Worker], request: RoutingRequest, tried: Tried) -> bool:
    return any(worker.usable and worker.serves(request.model) and (worker.address, worker.generation) not in tried for worker in side)


def canary_metrics(report: SplitReport) -> Iterator[Metric]:
    """Yield the metrics of both sides, labelled with the canary's revision; without values while there is no canary."""
    labels = ["side", "revision"]
    weight = GaugeMetricFamily("fairlead_router_canary_weight", "Percent of requests routed to the canary", labels=["revision"])
    requests = CounterMetricFamily("fairlead_router_side_requests", "Attempts at canary and stable pods", labels=labels)
    errors = CounterMetricFamily("fairlead_router_side_errors", "Failed attempts: 5xx, no answer, or a truncated answer", labels=labels)
    seconds = "Seconds from sending a request to the first byte of its answer"
    ttft = GaugeMetricFamily("fairlead_router_side_ttft_seconds", seconds, labels=[*labels, "quantile"])
    if report.revision:
        weight.add_metric([report.revision], report.weight)
        for name, side in (("canary", report.canary), ("stable", report.stable)):
            requests.add_metric([name, report.revision], side.requests)
            errors.add_metric([name, report.revision], side.errors)
            for share in QUANTILES if side.ttft.count else ():
                ttft.add_metric([name, report.revision, str(share)], side.ttft.quantile(share))
    yield from (weight, requests, errors, ttft)
