"""TCP keep-alive, so that the kernel ends a connection whose peer's machine is gone, also while the router only waits for bytes.

It does not detect a stopped or busy process, since that machine's kernel still answers. The health checks detect a silent process.
"""

import asyncio
import socket

_OPTIONS = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")


def enable_tcp_keepalive(transport: asyncio.BaseTransport, seconds: float) -> None:
    """Let the kernel end the connection (ETIMEDOUT) after about `seconds` without an acknowledgement.

    Probes begin after a third of that time. Linux' TCP_USER_TIMEOUT then bounds the time of probes and of unacknowledged data alike
    (RFC 5482; tcp(7)). The defaults are two hours for an idle connection and a quarter of an hour for one that sends.
    """
    wire = transport.get_extra_info("socket")
    if wire is None or wire.family == socket.AF_UNIX or not all(hasattr(socket, name) for name in _OPTIONS):
        return
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 3)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 6)))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(1000 * seconds)))
