"""Sockets between nodes: ZeroMQ over TCP, with keys, and a monitor that tells when the other side is gone.

A connection that breaks is never mended: messages may have been lost with it, and ranks that have not computed the same are no model. A
peer that is silent (a node without power, a stopped process) is given up by ZMTP's own heartbeats, which need no Python to be answered.
"""

import zmq
from zmq.utils.monitor import recv_monitor_message

HEARTBEAT_MS, SILENCE_MS = 1000, 8000
"""A peer is asked for a sign of life each second, and given up after eight without one."""
LINGER_MS = 2000
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | FAILED

Context = zmq.Context["zmq.Socket[bytes]"]
Socket = zmq.Socket[bytes]


def make_socket(context: Context, kind: int) -> Socket:
    """Unbounded, IPv6 too, with heartbeats; neither bound nor connected."""
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
    """The port that it listens on; 0: any free one. Raises OSError."""
    try:
        socket.bind(endpoint(host, port or "*"))
    except zmq.ZMQError as error:
        raise OSError(error.errno, str(error)) from error
    return int(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2])


def monitor(socket: Socket) -> Socket:
    """Tells what happens to the connections of `socket`."""
    return socket.get_monitor_socket(WATCHED)


def read_events(monitor: Socket) -> list[int]:
    """The events since the last look."""
    found = []
    while monitor.poll(0):
        found.append(int(recv_monitor_message(monitor)["event"]))
    return found
