"""Real processes of a fleet: routers, workers, Redis. Each is stopped by its own process id, and its log is kept."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.servers.redis_server import free_port
from tests.system.node import Node

NAMESPACE = "default/faults"


def until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


def fetch(url: str) -> Any:
    """Return the JSON of a page; None until it answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return json.load(answer)
    except (OSError, ValueError, urllib.error.URLError):
        return None


class Process:
    """One process that can be restarted at the same address."""

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self._command, self._log = name, command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def child(self) -> int:
        """Return the pid of its only child."""
        (pid,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return int(pid)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, also a stopped process. Returns when it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, seconds: float) -> int:
        """Return the exit status."""
        assert self._process is not None
        return self._process.wait(seconds)

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def engine_worker(folder: Path, model: Path, pod: str, *flags: str, **settings: str) -> tuple[str, Process]:
    """Return the address and the process of a real worker with an engine. `settings`: environment variables."""
    port = free_port()
    settings = {"FAIRLEAD_POD_NAME": pod, "FAIRLEAD_TERMINATION_LOG": os.devnull} | settings
    command = ["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable, "-m", "fairlead_worker.main"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", f"file://{model}", "--served-model-name", "tiny"]
    return f"127.0.0.1:{port}", Process(pod, [*command, "--kv-pages", "600", "--threads", "1", *flags], folder / f"{pod}.log")


class Fleet:
    """`routers` and `workers` as processes: a worker on each of `nodes`, discovery by a file, an index if `redis` names one.

    A context manager: when it is entered, everything runs and is ready.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int = 3,
        routers: int = 2,
        nodes: Sequence[Node] = (),
        redis: str = "",
        policy: str = "PrefixAware",
        flags: Sequence[str] = (),
        has_admin_ports: bool = False,
    ) -> None:
        self._folder, self._redis, self._policy, self._flags = folder, redis, policy, flags
        self._has_admin_ports = has_admin_ports
        self.admin: dict[str, str] = {}
        """Where the admin paths of a router are, by its URL."""
        self.workers: dict[str, Process] = {}
        """Processes by address."""
        self.pods: dict[str, str] = {}
        """Address of each pod name."""
        self.routers: dict[str, Process] = {}
        """Processes by URL."""
        for _ in range(workers):
            self.add_worker()
        for node in nodes:
            self.add_worker(node.address, node.prefix)
        for number in range(routers):
            self._add_router(f"router-{number}")

    def add_worker(self, host: str = "127.0.0.1", prefix: Sequence[str] = ()) -> str:
        """Add a worker to discovery and return its pod name. `start` or the caller starts it."""
        port, pod = free_port(), f"pod-{len(self.workers)}"
        command = [*prefix, sys.executable, "-m", "tests.system.worker_process", "--host", host, "--port", str(port), "--pod-name", pod]
        if self._redis:
            command += ["--redis-url", self._redis, "--index-namespace", NAMESPACE]
        self.add_process(pod, f"{host}:{port}", Process(pod, command, self._folder / f"{pod}.log"))
        return pod

    def add_process(self, pod: str, address: str, process: Process) -> None:
        self.workers[address], self.pods[pod] = process, address
        listed = self._folder / "workers.new"
        listed.write_text("".join(f"{address}\n" for address in self.workers))
        listed.replace(self._folder / "workers")

    def worker(self, pod: str) -> Process:
        return self.workers[self.pods[pod]]

    def start(self) -> "Fleet":
        for process in (*self.workers.values(), *self.routers.values()):
            process.start()
        self.settled()
        return self

    def settled(self, seconds: float = 120.0) -> None:
        """Wait until every router sees every worker as usable and the index answers."""
        for url in self.routers:
            until(lambda url=url: self._sees_all(url), f"{url} sees every worker and the index", seconds)  # type: ignore[misc]

    def _sees_all(self, url: str) -> bool:
        picture = fetch(f"{self.admin[url]}/fairlead/workers")
        if picture is None or fetch(f"{url}/ready") is None:
            return False
        usable = {worker["address"] for worker in picture["workers"] if worker["usable"]}
        return usable == set(self.workers) and picture["index"] in ("ok", "off", "unused")

    def _add_router(self, name: str) -> None:
        port = free_port()
        command = [sys.executable, "-m", "fairlead_router.main", "--host", "127.0.0.1", "--port", str(port), "--policy", self._policy]
        command += ["--workers", f"file://{self._folder / 'workers'}", "--index-namespace", NAMESPACE]
        command += ["--redis-url", self._redis] if self._redis else []
        url = f"http://127.0.0.1:{port}"
        self.admin[url] = f"http://127.0.0.1:{free_port()}" if self._has_admin_ports else url
        command += ["--admin-port", self.admin[url].rpartition(":")[2]] if self._has_admin_ports else []
        self.routers[url] = Process(name, [*command, *self._flags], self._folder / f"{name}.log")

    def __enter__(self) -> "Fleet":
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        for process in (*self.routers.values(), *self.workers.values()):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
