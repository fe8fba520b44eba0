"""One local pod: a process that is started, probed and, when it ends, restarted with exponential backoff."""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from fairlead.local.containers import LOOPBACK, Container, Probe
from fairlead.local.process import Exit, Guard, Process, last_lines

FIRST_BACKOFF, MAX_BACKOFF = 1.0, 30.0
"""Seconds before the first restart, and the maximum. A kubelet waits 10 s to 5 min; here a user waits at a terminal."""
BACKOFF_RESET = 60.0
"""Seconds of running after which the backoff starts again from the first delay."""
POLL = 0.5
"""Seconds between probes while a pod is not ready. The manifest's period applies if it is shorter, and after the pod is ready."""


@dataclass(frozen=True)
class PodState:
    """The state of a pod. `percent`, `bytes`, `total_bytes` (0: not counted) and `reason` come from the worker's /ready."""

    phase: str = "Pending"
    percent: int | None = None
    bytes: int = 0
    total_bytes: int = 0
    reason: str = ""
    ready: bool = False
    restarts: int = 0


class Pod:
    """A pod that runs until `stop`. `changed` is called without arguments whenever `state` changes."""

    def __init__(
        self, name: str, container: Container, *, log: Path, termination_log: Path, guard: Guard, changed: Callable[[], None]
    ) -> None:
        self.name = name
        self.container = container
        self.log = log
        self.state = PodState()
        self._termination_log = termination_log
        self._guard = guard
        self._changed = changed
        self._process: Process | None = None
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.container.port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"pod {self.name}")

    async def stop(self, grace: float) -> None:
        """End the process: SIGTERM, at most `grace` seconds, then SIGKILL. Returns when its whole group has ended."""
        self._grace = grace
        self._stop.set()
        self._set()
        if self._process:
            await self._process.stop(grace)
        if self._task:
            await self._task

    def terminate(self) -> None:
        """Send one more SIGTERM to a pod that stops."""
        if self._process:
            self._process.terminate()

    def last_output(self) -> list[str]:
        """Return the termination message of the failed container, else the end of its log."""
        return last_lines(self._termination_log) or last_lines(self.log)

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        while True:
            began = time.monotonic()
            ended = await self._run_once()
            if self._stop.is_set():
                return
            if time.monotonic() - began > BACKOFF_RESET:
                backoff = FIRST_BACKOFF
            self._set(phase="CrashLoopBackOff", percent=None, reason=ended, ready=False, restarts=self.state.restarts + 1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stop.wait()
                return
            backoff = min(2 * backoff, MAX_BACKOFF)

    async def _run_once(self) -> str:
        """Start the process and probe it until it ends. Return how it ended."""
        self._termination_log.unlink(missing_ok=True)
        try:
            self._process = await Process.start(self.container.command, env=self.container.env, log=self.log, guard=self._guard)
        except OSError as error:
            return f"cannot start {self.container.command[0]}: {error.strerror}"
        if self._stop.is_set():  # `stop` was called while the process was being created
            return str(await self._process.stop(self._grace))
        self._set(phase="Starting", percent=None, reason="", ready=False)
        probing = asyncio.create_task(self._probe(self._process))
        try:
            ended: Exit = await self._process.wait()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            self._process = None
        return str(ended)

    async def _probe(self, process: Process) -> None:
        """Probe readiness all the time, and liveness after the pod was ready once.

        `failures` failed liveness probes in a row kill the process.
        """
        failures = 0
        was_ready = False
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                ready = await self._is_ready(client)
                was_ready = was_ready or ready
                if self._stop.is_set():  # it drains and may have closed its port: only the grace period ends it now
                    return
                alive = not was_ready or self.container.liveness is None or await _answers(client, self.container.liveness)
                failures = 0 if alive else failures + 1
                if self.container.liveness and failures >= self.container.liveness.failures and not self._stop.is_set():
                    self._set(ready=False, reason=f"{self.container.liveness.path} failed {failures} times: killed")
                    await process.stop(grace=1)
                    return
                probe = self.container.liveness if failures else self.container.readiness if ready else None
                await asyncio.sleep(min(probe.period, 5.0) if probe else POLL)

    async def _is_ready(self, client: httpx.AsyncClient) -> bool:
        probe = self.container.readiness
        if probe is None:
            self._set(phase="Running", ready=True)
            return True
        try:
            answer = await client.get(f"http://{LOOPBACK}:{probe.port}{probe.path}", timeout=max(probe.timeout, 1.0))
        except httpx.HTTPError:
            if self.state.ready:
                self._set(phase="NotAnswering", percent=None, ready=False)
            return False
        if answer.status_code == 200:
            self._set(phase="Ready", percent=100, reason="", ready=True)
            return True
        self._set(**_progress(answer), ready=False)
        return False

    def _set(self, **changes: object) -> None:
        if self._stop.is_set():
            changes = {"phase": "Terminating", "ready": False}
        state = replace(self.state, **changes)  # type: ignore[arg-type]  # the callers are the lines above
        if state != self.state:
            self.state = state
            self._changed()


def _progress(answer: httpx.Response) -> dict[str, object]:
    """Return the progress in a 503 from /ready (contracts: Worker HTTP). An answer without it gives the HTTP status."""
    try:
        body = json.loads(answer.content)
        counted = {"bytes": int(body.get("bytes") or 0), "total_bytes": int(body.get("total_bytes") or 0)}
        return {
            "phase": str(body.get("phase") or "Loading"),
            "percent": body.get("percent"),
            "reason": str(body.get("reason") or ""),
        } | counted
    except (ValueError, AttributeError, TypeError):
        return {"phase": "Starting", "percent": None, "reason": f"HTTP {answer.status_code}"}


async def _answers(client: httpx.AsyncClient, probe: Probe) -> bool:
    try:
        answer = await client.get(f"http://{LOOPBACK}:{probe.port}{probe.path}", timeout=max(probe.timeout, 1.0))
    except httpx.HTTPError:
        return False
    return answer.status_code == 200
