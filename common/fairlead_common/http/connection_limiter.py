"""Bounds on connections: how many there are, and how long each may take to say what it wants (slow loris).

The protocol tells what happens on its connection; one look a second at all of them closes what is late, so that a request costs no timer.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Generic, Protocol, TypeVar

SPARE = 64
"""Connections beyond the bound that may still ask for the pages of probes: a kubelet that gets no answer would end the process."""
STARTS_PER_PASS = 8
"""Requests read ahead that start in one pass of the event loop. Else thousands of pipelining clients make a pass seconds long."""
SPARE_PATHS = ("/health", "/ready", "/metrics")


class Limits(Protocol):
    """The bounds, as both servers' configurations have them; times in seconds."""

    @property
    def max_header_bytes(self) -> int: ...

    @property
    def max_headers(self) -> int: ...

    @property
    def max_connections(self) -> int: ...

    @property
    def header_timeout(self) -> float: ...

    @property
    def body_timeout(self) -> float: ...


class LimitedConnection(Protocol):
    """One client's connection. `deadline`: monotonic seconds by which it must have said what it has begun to say; 0 for none."""

    deadline: float

    def late(self) -> None:
        """Its deadline is over: answer 408 if anything came, and close."""

    def close_idle(self) -> None:
        """Nothing is under way on it, and others need its place: close."""


Connection = TypeVar("Connection", bound=LimitedConnection)


class ConnectionLimiter(Generic[Connection]):
    """Knows every connection of a server."""

    def __init__(self, limits: Limits) -> None:
        self.max_header_bytes, self.max_headers = limits.max_header_bytes, limits.max_headers
        self.max_connections = limits.max_connections
        self._header_timeout, self._body_timeout = limits.header_timeout, limits.body_timeout
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """Those without a request, the longest idle first."""
        self._starts: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._open))

    def add(self, connection: Connection) -> bool:
        """A new connection; False where it must be closed at once. Takes the place of the longest idle one when there is no other."""
        if len(self._open) >= self.max_connections and self._idle:
            longest = next(iter(self._idle))
            self.remove(longest)
            longest.close_idle()
        if len(self._open) >= self.max_connections + SPARE:
            return False
        self._open.add(connection)
        self.expects_head(connection)
        return True

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def is_full_for(self, path: str) -> bool:
        """A request for `path` has to be refused, as there are too many connections."""
        return len(self._open) > self.max_connections and path not in SPARE_PATHS

    def expects_head(self, connection: Connection) -> None:
        """A request has begun, or should soon on a new connection."""
        self._idle.pop(connection, None)
        connection.deadline = monotonic() + self._header_timeout

    def expects_body(self, connection: Connection) -> None:
        connection.deadline = monotonic() + self._body_timeout

    def clear_deadline(self, connection: Connection) -> None:
        """Everything has come of the request."""
        connection.deadline = 0.0

    def mark_idle(self, connection: Connection) -> None:
        """It waits for its next request, unless that has begun."""
        if not connection.deadline and connection in self._open:
            self._idle[connection] = None

    def schedule(self, start: Callable[[], None]) -> None:
        """Call `start`, which starts a request that was read ahead, soon: in turn with those of other connections."""
        if not self._starts:
            asyncio.get_running_loop().call_soon(self._run_starts)
        self._starts.append(start)

    def _run_starts(self) -> None:
        try:
            for _ in range(min(STARTS_PER_PASS, len(self._starts))):
                self._starts.popleft()()
        finally:  # a start that fails must not leave all others without a turn
            if self._starts:
                asyncio.get_running_loop().call_soon(self._run_starts)

    def close_overdue(self, now: float) -> None:
        """End what is late. Once a second is enough."""
        for connection in [one for one in self._open if 0 < one.deadline < now]:
            connection.deadline = 0.0
            connection.late()
