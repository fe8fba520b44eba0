"""Health check of each worker about once a second: readiness, draining, load and prompt format."""

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
"""Consecutive checks without an answer after which a worker is avoided while others are usable."""
ABANDON_CHECKS = 3
"""Consecutive checks without an answer after which its unanswered requests are retried elsewhere: at most 4.1 s after it stopped."""
FORMAT_SECONDS = 30.0
"""Interval of revalidating the prompt format by its ETag."""


class _Load(WorkerLoad, frozen=True):
    pod: str = ""
    draining: bool = False
    ready: bool = True
    max_running: int = 0
    scheduling_policy: str = ""
    prompt_tokens: int | None = None  # counters since the worker's start, for fleet statistics; None: an older worker
    cached_tokens: int | None = None
    output_tokens: int | None = None
    role: str = ""
    canary: str = ""
    runtime: str = ""
    fallback: str = ""
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
    """Health checks, with one task for each worker of the table."""

    def __init__(self, table: WorkerTable, formats: PromptFormats, interval: float, silence_timeout: float, failures: Counter) -> None:
        """`failures`: counter of task failures, by name."""
        self._table, self._formats, self._interval = table, formats, interval
        self._silence_timeout, self._failures = silence_timeout, failures
        self._decoder = msgspec.json.Decoder(_Load)
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        table.on_added = self._start_task

    def _start_task(self, worker: Worker) -> None:
        task = self._tasks[worker] = supervise("health check", lambda: self._watch(worker), self._failures)
        task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, worker: Worker) -> None:
        missed, format_checked_at = 0, 0.0
        is_first = True  # after a restart of this task, an earlier change may not have been announced
        loop = asyncio.get_running_loop()
        while self._table.get(worker.address) is worker or worker.in_flight:  # a dropped worker's requests still need their timeouts
            worker.check_requested.clear()
            worker.marked_unhealthy, worker.checked_at = False, time.monotonic()
            was_usable, old_format, began = worker.usable, worker.format_tag, loop.time()
            was_ready, adapters = worker.ready, worker.adapters
            worker.pool.close_expired()
            try:
                reason = await self._check(worker)
                ready = not reason
                missed, worker.silent = 0, False
                if ready and worker.marked_unhealthy:
                    continue  # this check began before a request failed there, so it proves nothing
                if ready and (not worker.ready or not worker.format_tag or loop.time() - format_checked_at > FORMAT_SECONDS):
                    worker.format_tag = await self._formats.fetch(worker.admin, worker.format_tag)
                    worker.models = self._formats.names_of(worker.format_tag)
                    format_checked_at = loop.time()
                self._record_check(worker, reason)
            except (TimeoutError, Unreachable):
                missed += 1
                self._record_no_answer(worker, missed)
            except (UpstreamError, msgspec.MsgspecError) as error:
                missed = 0
                self._record_check(worker, str(error))
            except Exception as error:  # a bug here or an absurd answer: without this task the worker's state would never change
                logger.exception("health check of worker %s failed", worker.address)
                missed = 0
                self._record_check(worker, f"its answers cannot be read: {type(error).__name__}")
            if worker.ready != was_ready or worker.adapters != adapters:
                self._table.update_adapters()
                self._table.notify()
            if worker.usable != was_usable or worker.format_tag != old_format or is_first:
                self._formats.choose_current((other.canary, other.format_tag) for other in self._table if other.usable)
                self._table.notify()
                is_first = False
            if missed:  # the deadline replaces the pause: requests must leave a stopped worker soon
                await asyncio.sleep(began + CHECK_SECONDS - loop.time())
                continue
            try:
                async with asyncio.timeout(self._interval * random.uniform(0.9, 1.1)):
                    await worker.check_requested.wait()
            except TimeoutError:
                pass
        worker.close()

    async def _check(self, worker: Worker) -> str:
        """Return why the worker is not ready; empty if it is. Raises TimeoutError, UpstreamError, MsgspecError (not a worker's answer)."""
        head, body = await worker.admin.fetch("/ready", CHECK_SECONDS)
        if head.status != 200:
            return msgspec.json.decode(body, type=_NotReady).text
        head, body = await worker.admin.fetch("/load", CHECK_SECONDS)
        if head.status != 200:
            return f"/load answers {head.status}"
        load = self._decoder.decode(body)
        worker.load_at, worker.load, worker.draining = time.monotonic(), load, load.draining
        worker.role, worker.adapters, worker.canary = load.role, load.adapters, load.canary
        worker.max_running, worker.fallback = load.max_running, load.fallback
        worker.runs_shortest_first = load.scheduling_policy == "sjf"
        self._table.set_runtime(worker, load.runtime)
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
        if bool(reason) != bool(worker.reason) or worker.reason == NOT_CHECKED:  # the first check is always logged
            logger.info("worker %s is %s", worker.address, f"not ready: {reason}" if reason else f"ready (pod {worker.pod})")
        worker.ready, worker.reason = not reason, reason

    def _record_no_answer(self, worker: Worker, missed: int) -> None:
        """Record a check without any answer: the worker is stopped or hung, or its node is unreachable.

        The count is of checks, each of which is a second that this process ran. After a freeze of this process or of the whole machine, no
        worker is therefore considered silent.
        """
        if missed == SILENT_CHECKS:
            logger.warning("worker %s is silent: no answer to %d health checks", worker.address, missed)
        worker.silent = missed >= SILENT_CHECKS
        stopped = missed >= ABANDON_CHECKS and not worker.pool.has_recent_bytes(ABANDON_CHECKS * CHECK_SECONDS)
        if stopped and any(other.usable for other in self._table):
            worker.pool.fail_unanswered()  # these requests can still be served elsewhere
            worker.was_unready = True  # if it recovers, its new generation may serve them again
        if missed * CHECK_SECONDS >= self._silence_timeout:
            worker.pool.fail_silent(self._silence_timeout)
            if not worker.pool.has_recent_bytes(self._silence_timeout):  # not even a last resort: its unanswered requests wait for another
                worker.ready, worker.was_unready = False, True
                worker.pool.fail_unanswered()
