"""The engine as a child process, for local runs. In a cluster the kubelet runs it in its own container."""

import asyncio
import contextlib
import re
import signal
import sys
from collections import deque
from collections.abc import Callable

_KEPT_LINES = 20
OUTPUT_SECONDS = 1.0
"""Seconds to read the last output after the engine's end."""
_PROGRESS = re.compile(r"(\d{1,3})% Completed|Loading safetensors.*?(\d{1,3})%")
"""Progress of vLLM's and SGLang's loading of weights, in their output."""


class EngineProcess:
    """The engine's process, in this process's group: what ends the agent's group ends the engine too."""

    def __init__(self, command: list[str], on_progress: Callable[[int], None]) -> None:
        self._command, self._on_progress = command, on_progress
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self._child: asyncio.subprocess.Process | None = None

    async def run(self) -> str:
        """Run the engine until it ends. Return why it ended."""
        try:
            self._child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=1 << 20,
            )
        except OSError as error:
            return f"{self._command[0]} cannot be started: {error.strerror}"
        assert self._child.stdout is not None
        copying = asyncio.create_task(self._copy_output(self._child.stdout))
        try:
            code = await self._child.wait()
            # vLLM's engine process outlives a killed API process, and keeps the output open.
            await asyncio.wait((copying,), timeout=OUTPUT_SECONDS)
        finally:
            copying.cancel()
            await asyncio.gather(copying, return_exceptions=True)
        ending = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"the engine has ended, {ending}: {self._cause()}"

    async def _copy_output(self, output: asyncio.StreamReader) -> None:
        """Copy the engine's output to standard error, and read its progress."""
        async for line in _lines(output):
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            text = line.decode(errors="replace").strip()
            if text:
                self._last.append(text)
            if found := _PROGRESS.search(text):
                self._on_progress(int(found[1] or found[2]))

    async def stop(self, grace: float) -> None:
        """End the process: SIGTERM, and SIGKILL after `grace` seconds."""
        if self._child is None or self._child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()
        try:
            async with asyncio.timeout(grace):
                await self._child.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
            await self._child.wait()

    def kill(self) -> None:
        """Kill the process immediately."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()

    def _cause(self) -> str:
        """Return the last line that names an error, or the last line."""
        errors = [line for line in self._last if re.search(r"\b\w*(Error|Exception)\b", line)]
        return (errors or list(self._last) or ["it wrote nothing"])[-1][-500:]


async def _lines(stream: asyncio.StreamReader):  # type: ignore[no-untyped-def]
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than the limit: it is dropped
            continue
        if not line:
            return
        yield line
