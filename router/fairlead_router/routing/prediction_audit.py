"""Whether the index was right: cached tokens as predicted and as the worker found them, for each worker. Who stays wrong tells all anew."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic

from fairlead_index.reader import IndexUnavailable
from fairlead_router.fleet.workers import Worker
from fairlead_router.metrics import Metrics
from fairlead_router.routing.policies import Choice, Wanted

logger = logging.getLogger(__name__)

SUSTAINED = 0.25
"""Share of the prompt, on average over recent answers, that the index may be wrong by."""
ANSWERS = 16
"""The average's memory, and how many answers it takes to judge."""
QUIET_SECONDS = 10.0
"""Between two requests for one worker; how often the index grants them, it decides itself."""

Held = Callable[[Wanted, Worker], Awaitable[int]]
"""Cached tokens that the index sees there now. Raises IndexUnavailable."""
Recall = Callable[[str], Awaitable[bool]]
"""Asks the index to have the worker at an address tell everything anew; False: not now. Raises IndexUnavailable."""


class Audit:
    """Compares each answer with its prediction."""

    def __init__(self, metrics: Metrics, held: Held, recall: Recall) -> None:
        self._metrics, self._held, self._recall = metrics, held, recall
        self._quiet: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def answered(self, wanted: Wanted, choice: Choice, cached: int) -> None:
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
            self._spawn(self._missing(wanted, choice, cached, block))
        else:
            self._note(choice.worker, error / wanted.prompt_tokens if error >= block else 0.0, 0.0)

    async def _missing(self, wanted: Wanted, choice: Choice, cached: int, block: int) -> None:
        """The worker held more than foretold. If the index knows it by now, it was news when the choice was made: no error of the index."""
        try:
            error = cached - await self._held(wanted, choice.worker)
        except IndexUnavailable:
            return
        self._note(choice.worker, 0.0, error / wanted.prompt_tokens if error >= block else 0.0)

    def _note(self, worker: Worker, over: float, under: float) -> None:
        wrong = worker.prediction
        wrong.note(worker.life, over, under)
        if wrong.answers < ANSWERS or wrong.worst < SUSTAINED or monotonic() < self._quiet.get(worker.address, 0.0):
            return
        self._quiet = {address: until for address, until in self._quiet.items() if until > monotonic()}
        self._quiet[worker.address] = monotonic() + QUIET_SECONDS
        self._spawn(self._ask(worker))

    async def _ask(self, worker: Worker) -> None:
        try:
            granted = await self._recall(worker.address)
        except IndexUnavailable:
            return
        if not granted:
            return  # another worker's turn, or this one's was a moment ago
        wrong = worker.prediction
        self._metrics.recalls.labels(worker.address).inc()
        logger.warning(
            "the index was wrong about %s for %d answers (said too much by %.0f %%, too little by %.0f %% of a prompt): it tells all anew",
            worker.address,
            wrong.answers,
            100 * wrong.over,
            100 * wrong.under,
        )
        wrong.recalls += 1
        wrong.forget()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
