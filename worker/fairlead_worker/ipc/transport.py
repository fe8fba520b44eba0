"""Messages between the API process and the engine: msgspec structs as msgpack over ZeroMQ PUSH/PULL.

The API side is asynchronous and binds; the engine side blocks and connects. Sending never blocks, so that the engine does not stall.
Messages for a slow reader wait in memory, bounded by the requests in flight.
"""

import asyncio
import logging
import shutil
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import zmq

from fairlead_worker.ipc.messages import FromEngine, ToEngine

logger = logging.getLogger(__name__)

YIELD_AFTER = 16
"""Messages received in a row before other tasks of the event loop run."""
MESSAGE_BYTES = 16 << 10
"""A longer message counts as several: one with log-probabilities has up to 1.7 MB, and takes 11 ms to decode."""
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # operations on the enumerations themselves are slower
LINGER_MS = 2000
"""Time for the last message (`Failed`) to be sent when the engine process ends."""


class ZmqChannel:
    """The API's end over ZeroMQ. `address` is a private directory with the two sockets; the engine connects to it.

    The event loop watches the socket's descriptor itself. `zmq.asyncio` needs a future and several poller calls per message, which cost a
    fifth of the API process's time for a token.
    """

    def __init__(self) -> None:
        # mkdtemp gives mode 0700: no other user of the node can reach the engine.
        self.address = tempfile.mkdtemp(prefix="fairlead-")
        self._context = zmq.Context()
        self._out = self._context.socket(zmq.PUSH)
        self._in = self._context.socket(zmq.PULL)
        for socket, name in ((self._out, "to"), (self._in, "from")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(_endpoint(self.address, name))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_received = 0
        """Messages received since the event loop last ran other tasks, long ones as several."""

    def send(self, message: ToEngine) -> None:
        try:
            self._out.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            # There is no peer: the engine process has ended, and the watcher of its process ends the streams.
            logger.debug("no engine to take %s", type(message).__name__)

    async def receive(self) -> FromEngine:
        if self._num_received >= YIELD_AFTER:
            self._num_received = 0
            await asyncio.sleep(0)
        if not int(self._in.get(_EVENTS)) & _POLLIN:  # half the cost of a receive that raises Again
            await self._readable()
        while True:
            try:
                data = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                # ZeroMQ's descriptor is edge-triggered: it signals only messages that arrive after the socket was found empty.
                await self._readable()
            else:
                self._num_received += 1 + len(data) // MESSAGE_BYTES
                return self._decoder.decode(data)

    async def _readable(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._in.FD, self._wake)
        self._num_received = 0
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._in.FD)
        self._in.close()
        self._out.close()
        self._context.term()
        shutil.rmtree(self.address, ignore_errors=True)


class ZmqEngineEnd:
    """The engine's end over ZeroMQ. Implements `engine.loop.EngineEnd`."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._in = self._context.socket(zmq.PULL)
        self._out = self._context.socket(zmq.PUSH)
        for socket, name in ((self._in, "to"), (self._out, "from")):
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.connect(_endpoint(address, name))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        # A download reports its progress from several threads, and ZeroMQ aborts the process if two threads use one socket together.
        self._sending = threading.Lock()

    def receive(self, timeout: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if 0 < timeout < 0.001:  # below the poller's resolution
            time.sleep(timeout)
        elif timeout and not self._in.poll(int(timeout * 1000)):
            return messages
        while True:
            try:
                messages.append(self._decoder.decode(self._in.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        with self._sending:
            self._out.send(self._encoder.encode(message))

    def close(self) -> None:
        self._in.close()
        self._out.close()
        self._context.term()


def _endpoint(address: str, name: str) -> str:
    return f"ipc://{Path(address) / name}"
