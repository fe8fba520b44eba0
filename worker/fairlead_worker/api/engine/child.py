"""The engine as a child process: started, watched, stopped. Whatever ends it, the client learns it, and nothing is left running."""

import asyncio
import logging
import os
import sys
import time

import msgspec

from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.api.engine.load_progress import LoadWatch, stuck
from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import Start
from fairlead_worker.exit_status import describe_exit

logger = logging.getLogger(__name__)

QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for work sleep. By default they spin for milliseconds: on a core that the API process, a client or another pod wants
too, a step then takes ten times as long (4 to 18 tokens a second instead of 70 to 160, 2 threads on 2 busy cores). The environment wins."""
LOOK_AFTER = 1.0
"""Seconds without a report after which a load's work is looked at, which costs a millisecond."""
LAST_WORDS_SECONDS = 0.5
"""How long the engine's own reason may take to arrive after its process has ended."""


class EngineChild:
    """One engine process. Its standard input is the rope it hangs on: when this process ends, however it ends, so does the engine."""

    def __init__(self, config: WorkerConfig, address: str, client: EngineClient) -> None:
        self._config = config
        self._address = address
        self._client = client
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._loading: LoadWatch | None = None

    async def run(self) -> None:
        """Start the process and wait for its end, which is reported to the client."""
        start = Start(address=self._address, config=self._config.model_dump())
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fairlead_worker.engine_process",
            stdin=asyncio.subprocess.PIPE,
            env=QUIET_THREADS | dict(os.environ),
            # Its own session: signals for the API process's group (Ctrl-C, `kill -- -group`) must not cut streams that drain.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")
        status = await self._process.wait()
        if self._stopping:
            return
        try:
            # `Failed` may still be in the socket, and names the cause better than an exit status does.
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._client.gone.wait()
        except TimeoutError:
            self._client.died(describe_exit("the engine process", status))

    async def watch(self) -> None:
        """Kill an engine that has been silent for too long, or whose load is stuck: a hung stream is worse than a dead one."""
        looks = 0
        while True:
            await asyncio.sleep(1.0)
            problem = self._problem()
            # Twice in a row: when this process itself was frozen (a paused container, a debugger), the first look comes before the
            # messages that have gathered are read.
            looks = looks + 1 if problem else 0
            if looks == 2:
                self._client.died(problem)
                self.kill()
                return

    def _problem(self) -> str:
        """Why the engine has to go; empty while it loads and gets on, or is heard."""
        if self._client.serving:
            silence, longest = self._client.silent_for(), self._config.engine_timeout
            return f"the engine gave no sign of life for {silence:.0f} s (--engine-timeout {longest:g})" if silence > longest else ""
        if self._process is None:
            return ""
        self._loading = self._loading or LoadWatch(self._client.state, self._process.pid)
        if self._client.stuck_for() > LOOK_AFTER:
            self._loading.look(time.monotonic())
        seconds = self._client.stuck_for()
        return stuck(self._client.state, seconds) if seconds > self._config.load_timeout else ""

    async def stop(self, grace: float) -> None:
        """End the process: politely, and after `grace` seconds for certain."""
        if self._process is None or self._process.returncode is not None:
            return
        self._stopping = True
        if self._client.serving:
            self._client.stop()
        else:  # it loads, and listens to nobody
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
