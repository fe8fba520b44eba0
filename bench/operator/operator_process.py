"""One operator process: its flags, its memory, its CPU, its readiness."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.operator.support.apiserver import ApiServer

TICKS = os.sysconf("SC_CLK_TCK")
SAMPLE = 2.0  # seconds
BUSY = 0.25  # of a core: below this for a sample an operator has settled


class Operator:
    """An operator process, started on creation. `user`: its name in the audit log, one of apiserver.USERS."""

    def __init__(self, server: ApiServer, user: str, router: str, folder: Path) -> None:
        self.user = user
        self.began = time.monotonic()
        self._log = folder / f"{user}-{time.monotonic_ns()}.log"
        flags = ["--worker-image=registry.example/fairlead/worker:1", "--router-image=registry.example/fairlead/control:1"]
        flags += [
            "--redis-url=redis://redis:6379",
            "--health-port=0",
            "--hub-endpoint=",
            f"--kubeconfig={server.kubeconfig_of(user, folder)}",
        ]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with self._log.open("wb") as log:
            command = [sys.executable, "-m", "bench.operator.entrypoint", router, *flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def resident(self) -> tuple[float, float]:
        """Return the memory in MiB: now, and the peak."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        now, most = (int(re.search(rf"{name}:\s+(\d+) kB", text).group(1)) for name in ("VmRSS", "VmHWM"))  # type: ignore[union-attr]
        return now / 1024, most / 1024

    @property
    def cpu(self) -> float:
        """Return the CPU seconds so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def ready(self) -> bool:
        """Return whether it leads with all watches up, or is a standby."""
        self.check()
        found = re.search(r"health on port (\d+)", self._log.read_text())
        if found is None:
            return False
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{found.group(1)}/readyz", timeout=5) as answer:
                return bool(json.load(answer)["ready"])
        except urllib.error.HTTPError:
            return False

    def check(self) -> None:
        """End the benchmark if the operator has ended. On an overloaded machine it loses its lease, and no kubelet restarts it here."""
        if self.process.poll() is not None:
            raise SystemExit(f"the operator has ended:\n{self._log.read_text()[-3000:]}")

    async def stands_by(self) -> None:
        """Returns when it answers that it is ready, leading or not."""
        while not await asyncio.to_thread(self.ready):  # noqa: ASYNC110
            await asyncio.sleep(0.2)

    async def settled(self) -> float:
        """Waits until it has nothing to do; returns the seconds from its start until then."""
        before, since = self.cpu, time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE)
            now, at = self.cpu, time.monotonic()
            if now - before < BUSY * (at - since) and self.ready():
                return since - self.began
            before, since = now, at

    def errors(self) -> list[str]:
        return [line for line in self._log.read_text(errors="replace").splitlines() if " ERROR " in line or "Traceback" in line]

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(timeout=60)
