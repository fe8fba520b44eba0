"""Limits on connections: their number, and how long each may take to send a request (slow loris).

Each connection reports its events. One check per second closes overdue connections, so that a request needs no timer.
"""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Protocol

from fairlead_common.http.start_turns import ClientOf, StartTurns

MAX_HEADER_BYTES, MAX_HEADERS = 64 * 1024, 128
"""Of a request: bytes of its first line and headers, and their number."""
SPARE = 64
"""Connections above the limit that may still request probe paths: a kubelet without a reply would kill the process."""
PROBE_PATHS = ("/health", "/ready")
SPARE_PATHS = (*PROBE_PATHS, "/metrics")


class Limits(Protocol):
    """The limits in both servers' configurations. Times are in seconds."""

    @property
    def max_connections(self) -> int: ...

    @property
    def header_timeout(self) -> float: ...

    @property
    def body_timeout(self) -> float: ...


class LimitedConnection(Protocol):
    """One client's connection. `deadline`: monotonic seconds by which its request must be complete; 0 for none."""

    deadline: float

    def on_timeout(self) -> None:
        """Handle a passed deadline: send 408 if any bytes came, and close."""

    def close_idle(self) -> None:
        """Close an idle connection, because a new one needs its place."""


class ConnectionLimiter:
    """Tracks every connection of a server."""

    def __init__(self, limits: Limits, setting: Callable[[str], str], client_of: ClientOf = lambda headers: "") -> None:
        """`setting`: returns how a user writes a limit of this name, such as `--max-connections`. `client_of`: as in `StartTurns`."""
        self.setting = setting
        self.turns = StartTurns(client_of)
        self.max_connections = limits.max_connections
        self._header_timeout, self._body_timeout = limits.header_timeout, limits.body_timeout
        self._open: set[LimitedConnection] = set()
        self._idle: dict[LimitedConnection, None] = {}
        """Connections without a request, the longest idle first."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LimitedConnection]:
        return iter(list(self._open))

    def add(self, connection: LimitedConnection, replaced: LimitedConnection | None = None) -> bool:
        """Add a new connection. Return False if it must be closed. At the limit it replaces the longest idle one.

        `replaced`: an entry whose place it takes, such as its TLS handshake.
        """
        if replaced is not None:
            self.remove(replaced)
        if len(self._open) >= self.max_connections and self._idle:
            longest = next(iter(self._idle))
            self.remove(longest)
            longest.close_idle()
        if len(self._open) >= self.max_connections + SPARE:
            return False
        self._open.add(connection)
        self.start_head_timeout(connection)
        return True

    def remove(self, connection: LimitedConnection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def is_full_for(self, path: str) -> bool:
        """Return whether a request for `path` must be refused for too many connections."""
        return len(self._open) > self.max_connections and path not in SPARE_PATHS

    def start_head_timeout(self, connection: LimitedConnection) -> None:
        """Start the timeout of a request's head, also for a new connection."""
        self._idle.pop(connection, None)
        connection.deadline = monotonic() + self._header_timeout

    def start_body_timeout(self, connection: LimitedConnection) -> None:
        """Start the timeout of a request's body."""
        connection.deadline = monotonic() + self._body_timeout

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Mark a connection as idle after its response, unless its next request has begun."""
        if not connection.deadline and connection in self._open:
            self._idle[connection] = None

    def close_overdue(self, now: float) -> None:
        """Time out overdue connections. Call it about once a second."""
        for connection in [one for one in self._open if 0 < one.deadline < now]:
            connection.deadline = 0.0
            connection.on_timeout()
