"""A look at each worker about once a second: is it ready, is it draining, how loaded is it, what prompt format has it."""

import asyncio
import logging
import random
import time

import msgspec
from prometheus_client import Counter

from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.prompt_formats import PromptFormats
from fairlead_router.fleet.workers import NOT_CHECKED, Worker, WorkerTable
from fairlead_router.supervision import supervise
from fairlead_router.wire.upstream import Unreachable, UpstreamError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
SILENT_CHECKS = 2
"""Looks in a row without any answer after which a worker is not chosen while others are."""
ABANDON_CHECKS = 3
"""... and after which requests that it has not begun to answer are taken elsewhere: at most 4.1 s after it stopped."""
FORMAT_SECONDS = 30.0
"""How often the prompt format is asked for again, with its ETag."""


class _Load(WorkerLoad, frozen=True):
    pod: str = ""
    draining: bool = False
    ready: bool = True
    max_running: int = 0
    prompt_tokens: int | None = None  # counters since the worker began, for whoever asks what the fleet does; None: an older worker
    cached_tokens: int | None = None
    output_tokens: int | None = None
    role: str = ""
    canary: str = ""
    incarnation: str = ""
    adapters: dict[str, Adapter] = msgspec.field(default_factory=dict)


class _NotReady(msgspec.Struct):
    phase: str = ""
    percent: int | float = 0
    reason: str = ""

    @property
    def text(self) -> str:
        return self.reason or (f"{self.phase} {self.percent:g} %" if self.phase else "not ready")


class Poller:
    """One task for each worker of the table."""

    def __init__(self, table: WorkerTable, formats: PromptFormats, interval: float, silence_timeout: float, failures: Counter) -> None:
        """`failures`: of tasks, by name."""
        self._table, self._formats, self._interval = table, formats, interval
        self._silence_timeout, self._failures = silence_timeout, failures
        self._decoder = msgspec.json.Decoder(_Load)
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        table.on_added = self._start_task

    def _start_task(self, worker: Worker) -> None:
        task = self._tasks[worker] = supervise("looks", lambda: self._watch(worker), self._failures)
        task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        missed, format_age, begun = 0, 0.0, True  # begun anew after a fault: what changed just before it may not have been told
        loop = asyncio.get_running_loop()
        while self._table.get(worker.address) is worker or worker.in_flight:  # who waits at one that was dropped must not wait for ever
            worker.check_requested.clear()
            worker.marked_unhealthy, worker.checked_at = False, time.monotonic()
            was_usable, known, began = worker.usable, worker.format_tag, loop.time()
            was_ready, adapters = worker.ready, worker.adapters
            worker.pool.close_expired()
            try:
                reason = await self._check(worker)
                ready = not reason
                missed, worker.silent = 0, False
                if ready and worker.marked_unhealthy:
                    continue  # begun before a request found it gone: it proves nothing
                if ready and (not worker.ready or not worker.format_tag or loop.time() - format_age > FORMAT_SECONDS):
                    worker.format_tag = await self._formats.fetch(worker.admin, worker.format_tag)
                    worker.models = self._formats.names_of(worker.format_tag)
                    format_age = loop.time()
                self._record_check(worker, reason)
            except (TimeoutError, Unreachable):
                missed += 1
                self._record_no_answer(worker, missed)
            except (UpstreamError, msgspec.MsgspecError) as error:
                missed = 0
                self._record_check(worker, str(error))
            except Exception as error:  # our own fault, or an answer beyond reason: without this task it would stay as it was for ever
                logger.exception("looking at worker %s failed", worker.address)
                missed = 0
                self._record_check(worker, f"its answers cannot be read: {type(error).__name__}")
            if worker.ready != was_ready or worker.adapters != adapters:
                self._table.update_adapters()
                self._table.notify()
            if worker.usable != was_usable or worker.format_tag != known or begun:
                self._formats.choose_current((other.canary, other.format_tag) for other in self._table if other.usable)
                self._table.notify()
                begun = False
            if missed:  # its deadline was pause enough: a stopped worker must not hold requests for long
                await asyncio.sleep(began + CHECK_SECONDS - loop.time())
                continue
            try:
                async with asyncio.timeout(self._interval * random.uniform(0.9, 1.1)):
                    await worker.check_requested.wait()
            except TimeoutError:
                pass
        worker.close()

    async def _check(self, worker: Worker) -> str:
        """Why it is not ready, empty if it is. Raises TimeoutError, UpstreamError, MsgspecError (not a worker's answer)."""
        head, body = await worker.admin.fetch("/ready", CHECK_SECONDS)
        if head.status != 200:
            return msgspec.json.decode(body, type=_NotReady).text
        head, body = await worker.admin.fetch("/load", CHECK_SECONDS)
        if head.status != 200:
            return f"/load answers {head.status}"
        load = self._decoder.decode(body)
        worker.load_at, worker.load, worker.draining = time.monotonic(), load, load.draining
        worker.role, worker.adapters, worker.canary = load.role, load.adapters, load.canary
        worker.max_running = load.max_running
        if worker.incarnation != load.incarnation:
            worker.incarnation = load.incarnation
            self._table.on_incarnation()
        worker.pod = load.pod or worker.pod
        return "" if load.ready and not load.draining else "draining" if load.draining else "not ready"

    def _record_check(self, worker: Worker, reason: str) -> None:
        if reason:
            worker.was_unready = True
        else:
            if worker.was_unready:
                worker.generation = time.monotonic_ns()
            worker.was_unready = False
            worker.breaker.record_healthy_check()
        if bool(reason) != bool(worker.reason) or worker.reason == NOT_CHECKED:  # one that was never ready is told of, too
            logger.info("worker %s is %s", worker.address, f"not ready: {reason}" if reason else f"ready (pod {worker.pod})")
        worker.ready, worker.reason = not reason, reason

    def _record_no_answer(self, worker: Worker, missed: int) -> None:
        """It does not answer at all: stopped, hung, or its node is cut off. Counted in looks, each of them a second that this process
        has lived through: after a freeze of our own, or of the whole machine, nobody is taken for silent."""
        if missed == SILENT_CHECKS:
            logger.warning("worker %s is silent: no answer to %d looks", worker.address, missed)
        worker.silent = missed >= SILENT_CHECKS
        stopped = missed >= ABANDON_CHECKS and not worker.pool.has_recent_bytes(ABANDON_CHECKS * CHECK_SECONDS)
        if stopped and any(other.usable for other in self._table):
            worker.pool.fail_unanswered()  # what it has not begun can still be done elsewhere
            worker.was_unready = True  # and should it wake, may be done there after all
        if missed * CHECK_SECONDS >= self._silence_timeout:
            worker.pool.fail_silent(self._silence_timeout)
            if not worker.pool.has_recent_bytes(
                self._silence_timeout
            ):  # no last resort any more: whatever it has not begun is held for another
                worker.ready, worker.was_unready = False, True
                worker.pool.fail_unanswered()
