"""Sockets between nodes: ZeroMQ over TCP with keys, and a monitor of the connection.

A broken connection is never restored: messages may be lost, and ranks that computed different steps cannot continue. ZMTP's own
heartbeats detect a silent peer (a node without power, a stopped process); they need no Python to be answered.
"""

from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

HEARTBEAT_MS, SILENCE_MS = 1000, 8000
"""A heartbeat is sent each second. A peer that is silent for eight seconds is given up."""
LINGER_MS = 2000
POLL_MS = 100
"""Interval in which a sender checks whether its peer has ended."""
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED

Context = zmq.Context["zmq.Socket[bytes]"]
Socket = zmq.Socket[bytes]


def make_socket(context: Context, kind: int) -> Socket:
    """Make an unbounded socket with IPv6 and heartbeats, neither bound nor connected."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, SILENCE_MS)
    return socket


def endpoint(host: str, port: int | str) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind(socket: Socket, host: str, port: int = 0) -> int:
    """Bind the socket and return its port; `port` 0: any free one. Raises OSError."""
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error)) from error
    return int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])


def send_unless_ended(socket: Socket, parts: list[bytes], has_ended: Callable[[], bool]) -> None:
    """Send to the one peer of a PUSH socket. Wait until it connects, and drop the message if it has ended.

    ZeroMQ itself waits forever for a peer that has ended.
    """
    while True:
        try:
            socket.send_multipart(parts, zmq.NOBLOCK)
            return
        except zmq.Again:
            if has_ended():
                return
            socket.poll(POLL_MS, zmq.POLLOUT)


def monitor(socket: Socket) -> Socket:
    """Return a monitor of the connections of `socket`."""
    return socket.get_monitor_socket(WATCHED)


def read_events(monitor: Socket) -> list[int]:
    """Return the events since the last call."""
    found = []
    while monitor.poll(0):
        found.append(int(recv_monitor_message(monitor)["event"]))
    return found
