"""A worker process under test."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PAGES = 600


def until(condition: Callable[[], Any], what: str, seconds: float = 180) -> Any:
    """Poll `condition` and return its first true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return value


class WorkerProcess:
    """`fairlead-worker` on a free loopback port."""

    def __init__(self, model: Path, folder: Path, *flags: str, cwd: Path | None = None, **variables: str) -> None:
        """`variables`: environment variables, for settings without a flag."""
        folder.mkdir(exist_ok=True)
        self.log = folder / "log"
        self.termination_log = folder / "termination"
        standard = ("--host", "127.0.0.1", "--port", "0", "--kv-pages", str(PAGES), "--threads", "1", "--model", f"file://{model}")
        command = [sys.executable, "-m", "fairlead_worker.main", *standard, *flags]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRLEAD_")}
        environment |= {"FAIRLEAD_TERMINATION_LOG": str(self.termination_log)} | variables
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=cwd, start_new_session=True)
        address = str(until(lambda: self._logged(r"listening on http://(127\.0\.0\.\d+:\d+)"), "listening"))
        self.port = int(address.rpartition(":")[2])
        self.url = f"http://{address}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def _logged(self, pattern: str) -> str | None:
        if self.process.poll() is not None:
            raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.log.read_text()}")
        found = re.search(pattern, self.log.read_text())
        return found and found[1]

    def wait_ready(self) -> "WorkerProcess":
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.client.get("/ready").status_code == 200

        until(is_ready, "ready")
        return self

    @property
    def engine_pid(self) -> int:
        """The child process that is not the grammar checker."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = (int(child) for child in children if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes())
        return pid

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    @contextmanager
    def stream(self, path: str, **body: Any) -> Iterator[tuple[httpx.Response, Iterator[dict[str, Any] | str]]]:
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            yield response, events(response)

    def load(self) -> dict[str, Any]:
        return self.client.get("/load").json()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", self.client.get("/metrics").text, re.M)
        assert found, name
        return float(found[1])

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30) -> int:
        self.process.send_signal(number)
        return self.wait(seconds)

    def wait(self, seconds: float = 120) -> int:
        self.client.close()
        return self.process.wait(seconds)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.client.close()


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Yield decoded server-sent events, with `[DONE]` as a string. httpx's `iter_lines` also splits at U+2028, which a text may hold."""
    rest = ""
    for part in response.iter_text():
        *lines, rest = (rest + part).split("\n")
        for line in lines:
            if line.startswith("data: "):
                data = line.removeprefix("data: ")
                yield data if data == "[DONE]" else json.loads(data)
