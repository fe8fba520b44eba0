"""A connection whose peer's machine is gone must end, also while we only wait for its bytes: the kernel asks, and gives up in bounded time.

A stopped or busy process is not gone: its kernel answers for it. That a process is silent is for the poller to notice.
"""

import asyncio
import socket

_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")


def enable_tcp_keepalive(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Let the kernel end the connection (ETIMEDOUT) once nothing was acknowledged for about `seconds`.

    Probes begin after a third of it; Linux' TCP_USER_TIMEOUT then decides by time, for probes and for unacknowledged data alike
    (RFC 5482; tcp(7)). Without it the default is two hours for an idle connection, and a quarter of an hour for one that sends.
    """
    wire = transport.get_extra_info("socket")
    if wire is None or wire.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 6)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))
