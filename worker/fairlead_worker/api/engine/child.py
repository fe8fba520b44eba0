"""The engine as a child process: start it, monitor it, stop it. However it ends, the client is informed and no process is left."""

import asyncio
import logging
import os
import sys
import time

import msgspec

from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.engine.load_progress import LoadWatch, describe_stuck_load
from fairlead_worker.config import WorkerConfig
from fairlead_worker.ipc.messages import Start
from fairlead_worker.ipc.transport import ZmqChannel
from fairlead_worker.platform.processes import describe_exit

logger = logging.getLogger(__name__)

PASSIVE_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Let idle threads sleep. By default they spin for milliseconds. On a core that the API process, a client or another pod also needs, a step
then takes ten times as long (4 to 18 tokens a second instead of 70 to 160, 2 threads on 2 busy cores). The environment takes precedence."""
PROGRESS_CHECK_SECONDS = 1.0
"""Seconds without a report after which the load's work is measured. A measurement takes a millisecond."""
FAILURE_REASON_SECONDS = 0.5
"""Seconds to wait for the engine's own failure reason after its process has ended."""


class EngineChild:
    """One engine process and the channel to it. It exits when its stdin closes, so it ends with this process in every case."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._channel = ZmqChannel()
        self.client = EngineClient(self._channel)
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._loading: LoadWatch | None = None

    @property
    def address(self) -> str:
        """Folder of the channel's sockets."""
        return self._channel.address

    async def start(self) -> None:
        """Start the process."""
        start = Start(address=self.address, config=self._config.model_dump())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fairlead_worker.engine_process",
            stdin=asyncio.subprocess.PIPE,
            env=PASSIVE_THREADS | dict(os.environ),
            # Its own session: signals for the API process's group (Ctrl-C, `kill -- -group`) must not cut draining streams.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")

    async def run(self) -> None:
        """Wait for the end of the process, and report it to the client."""
        assert self._process is not None, "it is started"
        status = await self._process.wait()
        if self._stopping:
            return
        try:
            # `Failed` may still be in the socket. It names the cause better than an exit status.
            async with asyncio.timeout(FAILURE_REASON_SECONDS):
                await self.client.ended.wait()
        except TimeoutError:
            self.client.mark_failed(describe_exit("the engine process", status))

    async def watch(self) -> None:
        """Kill an engine that sends no message for too long, or whose load is stuck. A hung stream is worse than a failed one."""
        failed_checks = 0
        while True:
            await asyncio.sleep(1.0)
            problem = self._find_problem()
            # Require two checks in a row. After this process was frozen (a paused container, a debugger), the first check runs before the
            # queued messages are read.
            failed_checks = failed_checks + 1 if problem else 0
            if failed_checks == 2:
                self.client.mark_failed(problem)
                self.kill()
                return

    def _find_problem(self) -> str:
        """Return why the engine has to be killed, or an empty string while it makes progress."""
        if self.client.serving:
            silence, longest = self.client.seconds_since_message(), self._config.limits.engine_timeout
            return f"the engine sent no message for {silence:.0f} s (--limits engine_timeout {longest:g})" if silence > longest else ""
        if self._process is None:
            return ""
        self._loading = self._loading or LoadWatch(self.client.state, self._process.pid)
        if self.client.seconds_without_progress() > PROGRESS_CHECK_SECONDS:
            self._loading.check(time.monotonic())
        seconds = self.client.seconds_without_progress()
        return describe_stuck_load(self.client.state, seconds) if seconds > self._config.limits.load_timeout else ""

    async def stop(self, grace: float) -> None:
        """End the process gracefully, and kill it after `grace` seconds."""
        if self._process is None or self._process.returncode is not None:
            return
        self._stopping = True
        if self.client.serving:
            self.client.stop()
        else:  # it does not read messages while it loads
            self.kill()
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def close(self) -> None:
        """Close the channel, after the last task that uses the client."""
        self._channel.close()
