"""Audit of the index's predictions: predicted against actual cached tokens, for each worker.

A worker with a sustained error is made to resync with the index.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from fairlead_index.reader import IndexUnavailable
from fairlead_router.fleet.workers import Worker
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import Choice, RoutingRequest
from fairlead_router.supervision import stop_tasks

logger = logging.getLogger(__name__)

MAX_ERROR = 0.25
"""Largest accepted error, as a share of the prompt, averaged over recent answers."""
MIN_ANSWERS = 16
"""Answers that the average remembers, and fewest answers before it is used."""
RECALL_INTERVAL_SECONDS = 10.0
"""Shortest interval between two resync requests for one worker. The index may grant them less often."""

HeldTokens = Callable[[RoutingRequest, Worker], Awaitable[int]]
"""Return the cached tokens that the index shows for the worker now. Raises IndexUnavailable."""
Recall = Callable[[str], Awaitable[bool]]
"""Request a resync of the worker at an address; False: not granted. Raises IndexUnavailable."""


class PredictionAudit:
    """Comparison of each answer with its prediction."""

    def __init__(self, metrics: Metrics, held: HeldTokens, recall: Recall) -> None:
        self._metrics, self._held, self._recall = metrics, held, recall
        self._quiet_until: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record_answer(self, request: RoutingRequest, choice: Choice, cached: int) -> None:
        """Compare an answer with its prediction. `cached`: prompt tokens that the worker found in its cache."""
        hashes = request.hashes_of(choice.worker)
        if choice.predicted is None or choice.is_outdated or not len(hashes):
            return
        if not request.is_for(choice.worker):
            return  # another model with other tokens (a canary, a rollout): the prediction does not apply
        adapter = choice.worker.adapters.get(request.model)
        if (adapter.digest if adapter is not None else "") != request.adapter:
            return  # nor of another adapter under the same name: one was replaced there, or not yet
        block = request.prompt_tokens // len(hashes) + 1  # pages are smaller than blocks: less than one of these is no error
        error = choice.predicted - cached
        if error > 0:
            error = max(0, error - choice.in_flight)  # what this router expected beyond the index is no fault of the index
        if error <= -block:
            self._spawn(self._check_missing(request, choice, cached, block))
        else:
            self._record(choice.worker, error / request.prompt_tokens if error >= block else 0.0, 0.0)

    async def _check_missing(self, request: RoutingRequest, choice: Choice, cached: int, block: int) -> None:
        """Record that the worker held more than predicted, unless the index shows it by now: then the prediction was only early."""
        try:
            error = cached - await self._held(request, choice.worker)
        except IndexUnavailable:
            return
        self._record(choice.worker, 0.0, error / request.prompt_tokens if error >= block else 0.0)

    def _record(self, worker: Worker, over: float, under: float) -> None:
        error_average = worker.prediction_error
        error_average.record(worker.generation, over, under)
        if (
            error_average.answers < MIN_ANSWERS
            or error_average.worst < MAX_ERROR
            or monotonic() < self._quiet_until.get(worker.address, 0.0)
        ):
            return
        self._quiet_until = {address: until for address, until in self._quiet_until.items() if until > monotonic()}
        self._quiet_until[worker.address] = monotonic() + RECALL_INTERVAL_SECONDS
        self._spawn(self._request_recall(worker))

    async def _request_recall(self, worker: Worker) -> None:
        try:
            granted = await self._recall(worker.address)
        except IndexUnavailable:
            return
        if not granted:
            return  # the index limits how often workers resync
        error_average = worker.prediction_error
        self._metrics.recalls.labels(worker.address).inc()
        logger.warning(
            "predictions for worker %s were wrong over %d answers (too high by %.0f %%, too low by %.0f %% of a prompt): it resyncs",
            worker.address,
            error_average.answers,
            100 * error_average.over,
            100 * error_average.under,
        )
        error_average.recalls += 1
        error_average.reset()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        await stop_tasks(*self._tasks)
