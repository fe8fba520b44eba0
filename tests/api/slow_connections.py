"""Memory and event-loop stalls of a router and a worker with thousands of slow or hostile connections.

Both are separate processes. A normal client in another process sends /health and completions to each of them all the time. `stall` is the
most CPU time that the server's event loop used while one /health waited. Unlike the slowest answer, which is printed too, it contains no
wait for a core on a busy machine.

    python -m tests.api.slow_connections     # 5,000 of each kind; needs 16,000 file descriptors; minutes
"""

import argparse
import json
import multiprocessing
import re
import resource
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Any

from tests.api.fleet import Pair

ROUTER_FLAGS = ("--header-timeout", "300", "--body-timeout", "300")
WORKER_FLAGS = ("--limits", "header_timeout=300,body_timeout=300")
"""Long timeouts, so that the connections stay open."""
MOST_GROWTH_KIB = 64
MOST_STALL_MS = 50
SMALL_BUFFER = 4096
PACE = 500
"""New connections per second. More would measure the rate at which a server accepts connections."""
COMPLETION = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
LARGE_PAGE = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n"
TICKS = 50
"""Parts of a second. In each part other connections send, because slow clients are not synchronized."""


@dataclass(frozen=True)
class Kind:
    """A kind of client. It sends `first` immediately and `each` every second, and never reads."""

    name: str
    first: bytes
    each: bytes


KINDS = (
    Kind("head at 1 byte/s", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: ", b"x"),
    Kind("body at 1 byte/s", POST + b"content-length: 5000\r\n\r\n", b" "),
    Kind("never reads", LARGE_PAGE, b""),
    Kind("pipelines, never reads", LARGE_PAGE * 50, LARGE_PAGE),
    Kind("endless trailers", POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-slow: ", b"x" * 200),
)


@dataclass
class Row:
    """The effect of one kind on one process. Latencies in milliseconds, memory in KiB."""

    side: str
    kind: str
    connections: int
    held: int
    """Connections that are open at the end."""
    kib_a_connection: float
    good: int
    """Well-behaved requests that were answered."""
    failed: int
    p50: float
    p99: float
    slowest: float
    stall: float
    """Largest CPU time of the server's event loop during one well-behaved request."""
    alone: float
    """Largest latency of a well-behaved request without these connections."""


def loop_seconds(pid: int) -> float:
    """Return the CPU seconds of a process's main thread, which runs its event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def good_client(port: int, pid: int, stop: Event, results: "multiprocessing.Queue[tuple[str, list[float], list[float]]]") -> None:
    """Request /health every 10 ms and a completion every second until `stop`.

    Puts what failed, and of each /health its seconds and those that the server's event loop used meanwhile.
    """
    took: list[float] = []
    used: list[float] = []
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    due = 0.0
    try:
        while not (stop.is_set() and took):
            began, busy = time.perf_counter(), loop_seconds(pid)
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            took.append(time.perf_counter() - began)
            used.append(loop_seconds(pid) - busy)
            assert answer.status == 200, answer.status
            if began > due:
                due = began + 1
                connection.request("POST", "/v1/completions", COMPLETION, {"content-type": "application/json"})
                answer = connection.getresponse()
                said = answer.read()
                assert answer.status == 200, said[:300]
            time.sleep(0.01)
        results.put(("", took, used))
    except Exception as error:
        results.put((f"{type(error).__name__}: {error}", took, used))


@contextmanager
def watched(port: int, pid: int, into: list[Any]) -> Iterator[None]:
    """Run a well-behaved client while the context lasts. Its results go to `into`."""
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    client = context.Process(target=good_client, args=(port, pid, stop, results))
    client.start()
    try:
        yield
    finally:
        stop.set()
        with suppress(Empty):
            into.extend(results.get(timeout=90))
        client.join(10)


def resident_kib(pid: int) -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
    assert found is not None
    return int(found[1])


class Crowd:
    """Connections of one kind."""

    def __init__(self, port: int, kind: Kind, count: int) -> None:
        self._kind = kind
        self._open: list[socket.socket] = []
        for number in range(count):
            if number % 10 == 9:
                time.sleep(10 / PACE)
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            one.connect(("127.0.0.1", port))
            one.setblocking(False)
            self._open.append(one)
            self._send(one, kind.first)

    def go_on(self, tick: int) -> None:
        """Send on one part of the connections."""
        for one in self._open[tick % TICKS :: TICKS] if self._kind.each else ():
            self._send(one, self._kind.each)

    def held(self) -> int:
        """Return the number of connections that the server has not closed."""
        poll = select.poll()
        for one in self._open:
            poll.register(one, select.POLLRDHUP)
        return len(self._open) - len(poll.poll(0))

    def close(self) -> None:
        for one in self._open:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # no TIME_WAIT for thousands
            one.close()

    @staticmethod
    def _send(one: socket.socket, data: bytes) -> None:
        with suppress(OSError):  # closed, or it takes no more
            one.send(data)


def measure(side: str, port: int, pid: int, kind: Kind, count: int, seconds: float) -> Row:
    """Keep `count` connections of a kind open for `seconds` to the process `pid`, which listens on `port`."""
    first: list[Any] = []
    with watched(port, pid, first):
        time.sleep(3)
    before = most = resident_kib(pid)
    found: list[Any] = []
    with watched(port, pid, found):
        crowd = Crowd(port, kind, count)
        due = time.monotonic()
        for tick in range(int(seconds * TICKS)):
            crowd.go_on(tick)
            most = max(most, resident_kib(pid))
            due += 1 / TICKS
            time.sleep(max(0.0, due - time.monotonic()))
        most = max(most, resident_kib(pid))
        held = crowd.held()
    crowd.close()
    failure, took, used = found or ("no result", [], [])
    if failure:
        print(f"the good client failed: {failure}", file=sys.stderr)
    times = sorted(1e3 * one for one in took) or [float("nan")]
    return Row(
        side,
        kind.name,
        count,
        held,
        round((most - before) / count, 1),
        len(took),
        int(bool(failure)),
        round(statistics.median(times), 2),
        round(times[int(0.99 * (len(times) - 1))], 2),
        round(times[-1], 1),
        round(1e3 * max(used, default=float("nan")), 1),
        round(1e3 * max(first[1] if first else (), default=float("nan")), 1),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=5000, help="of each kind")
    parser.add_argument("--seconds", type=float, default=15, help="that each kind is held")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, Pair(Path(folder), *WORKER_FLAGS, router_flags=ROUTER_FLAGS) as pair:
        for side, port, pid in (("router", pair.router_port, pair.router.pid), ("worker", pair.worker.port, pair.worker.process.pid)):
            for kind in KINDS:
                rows.append(measure(side, port, pid, kind, options.connections, options.seconds))
                print(json.dumps(asdict(rows[-1])), flush=True)
                assert pair.alive, f"a process ended: {side}, {kind.name}"
    bad = [row for row in rows if row.kib_a_connection >= MOST_GROWTH_KIB or row.stall > MOST_STALL_MS or row.failed]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
