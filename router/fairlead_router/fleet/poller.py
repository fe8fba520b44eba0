"""Health check of each worker, once a second in a fleet of up to 500: readiness, draining, load and prompt format."""

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec
from prometheus_client import Counter

from fairlead_common.scheduling_policy import CACHED_FIRST
from fairlead_index.worker_load import WorkerLoad
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.check_pace import CheckPace
from fairlead_router.fleet.prompt_formats import FormatOf, PromptFormats
from fairlead_router.fleet.workers import NOT_CHECKED, Worker, WorkerTable
from fairlead_router.supervision import stop_tasks, supervise
from fairlead_router.wire.upstream import Unreachable, UpstreamError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
SILENT_CHECKS = 2
"""Consecutive checks without an answer after which a worker is avoided while others are usable."""
ABANDON_CHECKS = 3
"""Consecutive checks without an answer after which its unanswered requests are retried elsewhere: at most 4.1 s after it stopped.
In a fleet of N workers, at most 3 s and 1.1 times the greater of 1 s and N / 500 s."""
FORMAT_SECONDS = 30.0
"""Interval of revalidating the prompt format by its ETag."""


class _Load(WorkerLoad, frozen=True):
    pod: str = ""
    draining: bool = False
    ready: bool | None = None  # None: an older worker
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


@dataclass(slots=True)
class _History:
    """What earlier checks of a worker tell. `missed`: checks in a row without an answer."""

    missed: int = 0
    unanswered_seconds: float = 0.0
    """Seconds of these checks and between them. Each is one that this process ran."""
    format_checked_at: float = float("-inf")
    is_first: bool = True
    """After a restart of the task, an earlier change may not have been announced."""


class Poller:
    """Health checks, with one task for each worker of the table. A check does constant work, however large the fleet is."""

    def __init__(self, table: WorkerTable, formats: PromptFormats, interval: float, silence_timeout: float, failures: Counter) -> None:
        """`failures`: counter of task failures, by name."""
        self._table, self._formats, self._pace = table, formats, CheckPace(interval)
        self._silence_timeout, self._failures = silence_timeout, failures
        self._decoder = msgspec.json.Decoder(_Load)
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._counted: dict[Worker, FormatOf] = {}
        """Formats of the usable workers."""
        table.on_added = self._start_task

    def _start_task(self, worker: Worker) -> None:
        task = self._tasks[worker] = supervise("health check", lambda: self._watch(worker), self._failures)
        task.add_done_callback(lambda _: self._tasks.pop(worker, None))

    async def close(self) -> None:
        await stop_tasks(*self._tasks.values())

    async def _watch(self, worker: Worker) -> None:
        history = _History()
        while self._table.get(worker.address) is worker or worker.in_flight:  # a dropped worker's requests still need their timeouts
            await self._pace.turn()
            began = time.monotonic()
            worker.check_requested.clear()
            worker.marked_unhealthy, worker.checked_at = False, began
            old_format, was_ready, adapters = worker.format_tag, worker.ready, worker.adapters
            worker.pool.close_expired()
            is_recorded = await self._check_and_record(worker, history)
            self._table.bound_load_changes()
            if not is_recorded:
                continue
            if worker.ready != was_ready or worker.adapters != adapters:
                self._table.update_adapters(worker)
                self._table.notify()
            if worker.usable != (worker in self._counted) or worker.format_tag != old_format or history.is_first:
                self._count_format(worker)
                self._table.notify()
                history.is_first = False
            await self._pause(worker, history, began)
        worker.close()
        self._count_format(worker)

    async def _pause(self, worker: Worker, history: _History, began: float) -> None:
        """Wait for the next check. After a check without an answer its deadline replaces the pause: requests must leave a stopped worker
        soon. Once they have left, a worker of a large fleet is checked like the others."""
        pause = self._pace.pause(len(self._table))
        if history.missed:
            since = time.monotonic() - began
            rest = max(0.0, pause - CHECK_SECONDS) if history.missed > ABANDON_CHECKS else 0.0
            history.unanswered_seconds += rest
            await asyncio.sleep(CHECK_SECONDS + rest - since)
            return
        try:
            async with asyncio.timeout(pause):
                await worker.check_requested.wait()
        except TimeoutError:
            pass

    async def _check_and_record(self, worker: Worker, history: _History) -> bool:
        """Check a worker once. Return False if a request failed there meanwhile, so that the check proves nothing."""
        try:
            reason = await self._check(worker)
            history.missed, history.unanswered_seconds, worker.silent = 0, 0.0, False
            if not reason and worker.marked_unhealthy:
                return False
            now = time.monotonic()
            if not reason and (not worker.ready or not worker.format_tag or now - history.format_checked_at > FORMAT_SECONDS):
                worker.format_tag = await self._formats.fetch(worker.admin, worker.format_tag)
                worker.models = self._formats.names_of(worker.format_tag)
                history.format_checked_at = now
            self._record_check(worker, reason)
        except (TimeoutError, Unreachable):
            history.missed += 1
            history.unanswered_seconds += CHECK_SECONDS
            self._record_no_answer(worker, history)
        except (UpstreamError, msgspec.MsgspecError) as error:
            history.missed, history.unanswered_seconds = 0, 0.0
            self._record_check(worker, str(error))
        except Exception as error:  # a bug here or an absurd answer: without this task the worker's state would never change
            logger.exception("health check of worker %s failed", worker.address)
            history.missed, history.unanswered_seconds = 0, 0.0
            self._record_check(worker, f"its answers cannot be read: {type(error).__name__}")
        return True

    def _count_format(self, worker: Worker) -> None:
        """Count the worker's format while it is usable, and choose the current format anew."""
        is_counted = worker.usable and self._table.get(worker.address) is worker
        old, new = self._counted.pop(worker, None), (worker.canary, worker.format_tag) if is_counted else None
        if new is not None:
            self._counted[worker] = new
        self._formats.count(old, new)
        self._formats.choose_current()

    async def _check(self, worker: Worker) -> str:
        """Return why the worker is not ready; empty if it is. Raises TimeoutError, UpstreamError, MsgspecError (not a worker's answer).

        `/ready` gives the reason. It is not asked about a ready worker whose load says that it still is.
        """
        was_ready = worker.ready
        if not was_ready and (reason := await self._read_reason(worker)):
            return reason
        head, body = await worker.admin.fetch("/load", CHECK_SECONDS)
        load = self._decoder.decode(body) if head.status == 200 else None
        if was_ready and (load is None or not load.ready) and (reason := await self._read_reason(worker)):
            return reason
        if load is None:
            return f"/load answers {head.status}"
        self._record_load(worker, load)
        return "draining" if load.draining else "not ready" if load.ready is False else ""

    async def _read_reason(self, worker: Worker) -> str:
        """Return why `/ready` says that the worker is not; empty if it is."""
        head, body = await worker.admin.fetch("/ready", CHECK_SECONDS)
        return "" if head.status == 200 else msgspec.json.decode(body, type=_NotReady).text

    def _record_load(self, worker: Worker, load: _Load) -> None:
        worker.load_at, worker.load, worker.draining = time.monotonic(), load, load.draining
        worker.role, worker.adapters, worker.canary = load.role, load.adapters, load.canary
        worker.max_running, worker.fallback = load.max_running, load.fallback
        worker.runs_cached_first = load.scheduling_policy in CACHED_FIRST
        self._table.set_runtime(worker, load.runtime)
        if worker.incarnation != load.incarnation:
            worker.incarnation = load.incarnation
            self._table.on_incarnation()
        worker.pod = load.pod or worker.pod

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

    def _record_no_answer(self, worker: Worker, history: _History) -> None:
        """Record a check without any answer: the worker is stopped or hung, or its node is unreachable.

        The count is of checks, each of which is a second that this process ran. After a freeze of this process or of the whole machine, no
        worker is therefore considered silent.
        """
        missed = history.missed
        if missed == SILENT_CHECKS:
            logger.warning("worker %s is silent: no answer to %d health checks", worker.address, missed)
        worker.silent = missed >= SILENT_CHECKS
        stopped = missed >= ABANDON_CHECKS and not worker.pool.has_recent_bytes(ABANDON_CHECKS * CHECK_SECONDS)
        if stopped and self._table.any_answering():
            worker.pool.fail_unanswered()  # these requests can still be served elsewhere
            worker.was_unready = True  # if it recovers, its new generation may serve them again
        if history.unanswered_seconds >= self._silence_timeout:
            worker.pool.fail_silent(self._silence_timeout)
            if not worker.pool.has_recent_bytes(self._silence_timeout):  # not even a last resort: its unanswered requests wait for another
                worker.ready, worker.was_unready = False, True
                worker.pool.fail_unanswered()
