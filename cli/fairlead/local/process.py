"""Processes that cannot outlive this one. Each leads its own group and session; a guard process kills the groups if this process dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fairlead.local import guard

REAP_SECONDS, REAP_CHECKS = 1.0, 50
"""Seconds to wait until killed processes are gone. On a machine without an init process they remain as zombies."""


class Guard:
    """This process's end of the pipe to `guard.py`, as a context manager. Leaving it ends all groups that are still registered."""

    def __enter__(self) -> "Guard":
        # -I -S: nothing but the standard library's core, so that it starts in milliseconds.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__], stdin=subprocess.PIPE, start_new_session=True, text=True
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=guard.GRACE_SECONDS + 10)

    def register(self, group: int) -> None:
        self._write(f"+{group}")

    def unregister(self, group: int) -> None:
        self._write(f"-{group}")

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


@dataclass(frozen=True)
class Exit:
    """How a process ended. `code`: the exit status, or minus the number of the signal that killed it."""

    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit status {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


class Process:
    """One running command with its log file. `start` creates it and registers its group with the guard."""

    def __init__(self, child: asyncio.subprocess.Process, guard: Guard) -> None:
        self._child = child
        self._guard = guard
        self.pid = child.pid

    @classmethod
    async def start(cls, command: Sequence[str], *, env: Mapping[str, str], log: Path, guard: Guard, stdin: bytes = b"") -> "Process":
        """Start `command` with exactly `env`, both outputs appended to `log`. Raises OSError if it cannot be executed."""
        with log.open("ab") as out:
            child = await asyncio.create_subprocess_exec(
                *command,
                env=dict(env),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        guard.register(child.pid)
        if stdin:
            assert child.stdin is not None
            child.stdin.write(stdin)
            child.stdin.close()
        return cls(child, guard)

    async def wait(self) -> Exit:
        """Wait for the group's leader to end, then kill the rest of its group and wait for it too, at most `REAP_SECONDS`."""
        code = await self._child.wait()
        self._signal(signal.SIGKILL)
        for _ in range(REAP_CHECKS):
            if not guard.is_alive(self.pid):
                break
            await asyncio.sleep(REAP_SECONDS / REAP_CHECKS)
        self._guard.unregister(self.pid)
        return Exit(code)

    def terminate(self) -> None:
        """Send SIGTERM to the leader."""
        with contextlib.suppress(ProcessLookupError):
            self._child.terminate()

    async def stop(self, grace: float) -> Exit:
        """Send SIGTERM to the leader, as a kubelet does. After `grace` seconds send SIGKILL to the group."""
        self.terminate()
        try:
            async with asyncio.timeout(grace):
                return await asyncio.shield(self.wait())
        except TimeoutError:
            self._signal(signal.SIGKILL)
            return await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def last_lines(log: Path, count: int = 12, limit: int = 65536) -> list[str]:
    """Return the last `count` non-empty lines of a log. At most `limit` bytes are read."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
