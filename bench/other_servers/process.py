"""A measured server process: start, time to the first completion, memory, CPU time, end of all its processes."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from bench.other_servers.servers import NAME, Command

READY_SECONDS = 600.0
POLL_SECONDS = 0.1
END_SECONDS = 30.0
TICK = os.sysconf("SC_CLK_TCK")
LOG_LINES = 6


class NotServing(Exception):
    """The server ended or did not answer in time. The message is the end of its output."""


class Running:
    """A started server. Leaving the context ends its whole process group."""

    def __init__(self, command: Command, port: int, log: Path) -> None:
        self.port = port
        self.headers = command.headers
        self.began = time.monotonic()
        self._log = log
        self._output = log.open("wb")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRLEAD_", "PYTHON", "VIRTUAL_ENV"))}
        # A session of its own, so that one signal reaches all of it.
        self._process = subprocess.Popen(
            command.arguments,
            env=inherited | dict(command.variables),
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=log.parent,
        )

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        family = self.processes()
        self._process.terminate()
        deadline = time.monotonic() + (END_SECONDS if self._process.poll() is None else 0.0)
        while time.monotonic() < deadline and any(_alive(pid) for pid in family):
            self._process.poll()
            time.sleep(POLL_SECONDS)
        for pid in family:
            if _alive(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def wait_ready(self) -> float:
        """Return the seconds from the process's start to the first completion. Raises NotServing."""
        while time.monotonic() - self.began < READY_SECONDS:
            if self._process.poll() is not None:
                raise NotServing(f"ended with status {self._process.returncode}: {self._last_output()}")
            try:
                self.complete("ready", 1)
                return time.monotonic() - self.began
            except urllib.error.HTTPError as error:
                if error.code in (400, 422):
                    raise NotServing(f"refuses a completion with {error.code}: {error.read().decode(errors='replace')[:300]}") from error
                time.sleep(POLL_SECONDS)
            except OSError:
                time.sleep(POLL_SECONDS)
        raise NotServing(f"no completion within {READY_SECONDS:.0f} s: {self._last_output()}")

    def complete(self, prompt: str, tokens: int) -> tuple[str, int, int]:
        """Return the server's greedy completion, and its counts of prompt and output tokens. Raises OSError, and so HTTPError."""
        body = json.dumps({"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}).encode()
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=READY_SECONDS) as answer:
            found = json.load(answer)
        return found["choices"][0]["text"], found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]

    def processes(self) -> list[int]:
        """Return the pids of the server, of its session (with orphans), and of its descendants in other sessions."""
        family, children = [self._process.pid], dict[int, list[int]]()
        for path in Path("/proc").glob("[0-9]*"):
            pid = int(path.name)
            if (fields := _stat(pid)) and pid != self._process.pid:
                parent, session = int(fields[1]), int(fields[3])
                if session == self._process.pid:
                    family.append(pid)
                else:
                    children.setdefault(parent, []).append(pid)
        for pid in family:
            family += children.get(pid, [])
        return family

    def proportional_bytes(self) -> int:
        """Return the PSS of these processes in bytes: shared pages count once."""
        total = 0
        for pid in self.processes():
            try:
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")), 0)
        return total * 1024

    def cpu_seconds(self) -> float:
        """Return the CPU time of these processes so far."""
        return sum(_cpu_nanoseconds(pid) for pid in self.processes()) / 1e9

    def _last_output(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-LOG_LINES:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def machine_cpu_seconds() -> float:
    """Return the CPU time that all processes have used on all cores since the machine's start."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + irq + softirq) / TICK


def _cpu_nanoseconds(pid: int) -> int:
    """Return the CPU time of a process in nanoseconds (/proc counts hundredths of a second); 0 after its end."""
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)  # clock_getcpuclockid(3) of Linux
    except OSError:
        return 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty after the process's end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z"
