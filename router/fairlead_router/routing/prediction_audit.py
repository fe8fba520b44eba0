"""Whether the index was right: cached tokens as predicted and as the worker found them, for each worker. Who stays wrong tells all anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from fairlead_index.reader import IndexUnavailable
from fairlead_router.fleet.workers import Worker
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import Choice, RoutingRequest

logger = logging.getLogger(__name__)

MAX_ERROR = 0.25
"""Share of the prompt, on average over recent answers, that the index may be wrong by."""
MIN_ANSWERS = 16
"""The average's memory, and how many answers it takes to judge."""
RECALL_INTERVAL_SECONDS = 10.0
"""Between two requests for one worker; how often the index grants them, it decides itself."""

Held = Callable[[RoutingRequest, Worker], Awaitable[int]]
"""Cached tokens that the index sees there now. Raises IndexUnavailable."""
Recall = Callable[[str], Awaitable[bool]]
"""Asks the index to have the worker at an address tell everything anew; False: not now. Raises IndexUnavailable."""


class PredictionAudit:
    """Compares each answer with its prediction."""

    def __init__(self, metrics: Metrics, held: Held, recall: Recall) -> None:
        self._metrics, self._held, self._recall = metrics, held, recall
        self._quiet_until: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record_answer(self, wanted: RoutingRequest, choice: Choice, cached: int) -> None:
        """`cached`: prompt tokens that the worker found in its cache."""
        if choice.predicted is None or not len(wanted.hashes):
            return
        if choice.worker.format_tag != wanted.format_tag and choice.worker.format_tag and wanted.format_tag:
            return  # of another model or block size (a canary, a rollout): nothing was foretold of what it holds
        told = choice.worker.adapters.get(wanted.model)
        if (told.digest if told is not None else "") != wanted.adapter:
            return  # nor of another adapter under the same name: one was replaced there, or not yet
        block = wanted.prompt_tokens // len(wanted.hashes) + 1  # pages are smaller than blocks: less than one of these is no error
        error = choice.predicted - cached
        if error <= -block:
            self._spawn(self._check_missing(wanted, choice, cached, block))
        else:
            self._record(choice.worker, error / wanted.prompt_tokens if error >= block else 0.0, 0.0)

    async def _check_missing(self, wanted: RoutingRequest, choice: Choice, cached: int, block: int) -> None:
        """The worker held more than foretold. If the index knows it by now, it was news when the choice was made: no error of the index."""
        try:
            error = cached - await self._held(wanted, choice.worker)
        except IndexUnavailable:
            return
        self._record(choice.worker, 0.0, error / wanted.prompt_tokens if error >= block else 0.0)

    def _record(self, worker: Worker, over: float, under: float) -> None:
        wrong = worker.prediction_error
        wrong.record(worker.generation, over, under)
        if wrong.answers < MIN_ANSWERS or wrong.worst < MAX_ERROR or monotonic() < self._quiet_until.get(worker.address, 0.0):
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
            return  # another worker's turn, or this one's was a moment ago
        wrong = worker.prediction_error
        self._metrics.recalls.labels(worker.address).inc()
        logger.warning(
            "the index was wrong about %s for %d answers (said too much by %.0f %%, too little by %.0f %% of a prompt): it tells all anew",
            worker.address,
            wrong.answers,
            100 * wrong.over,
            100 * wrong.under,
        )
        wrong.recalls += 1
        wrong.reset()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
