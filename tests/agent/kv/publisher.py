"""An engine's publisher of KV events on real sockets, as in vLLM, with the faults that a test chooses."""

import contextlib
from collections import deque
from typing import Any

import zmq
import zmq.asyncio
from tests.agent.kv.test_blocks import encode

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """One engine process: numbers begin at 0. Construct it in the event loop."""

    def __init__(self, endpoint: str, replay: str, *, kept: int = 10_000, topic: bytes = b"") -> None:
        self.number = 0
        self._topic = topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for each in (self._events, self._replay):
            each.set(zmq.LINGER, 0)
        self._events.set_hwm(100_000)
        (self._events.bind if "*" in endpoint or endpoint.startswith("ipc:") else self._events.connect)(endpoint)
        if replay:
            self._replay.bind(replay)
        self.has_replay = bool(replay)
        self.delayed: list[tuple[int, bytes]] = []

    async def publish(self, events: list[dict[str, Any]], fault: str = "") -> None:
        """Send a batch. `fault`: `drop` it, or `delay` it until the next one was sent."""
        if not events:
            return
        batch = self.number, encode(events, as_maps=True)
        self.number += 1
        self._kept.append(batch)
        if fault == "drop":
            return
        if fault == "delay":
            self.delayed.append(batch)
            return
        await self._send(*batch)
        while self.delayed:
            await self._send(*self.delayed.pop())

    async def _send(self, number: int, payload: bytes) -> None:
        await self._events.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    async def serve_replay(self) -> None:
        """Answer requests for replay until cancelled."""
        while True:
            client, _, start = await self._replay.recv_multipart()
            for number, payload in list(self._kept):
                if number >= int.from_bytes(start, "big"):
                    await self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            await self._replay.send_multipart((client, b"", b"", END, b""))

    def kill(self) -> None:
        """End without a farewell."""
        with contextlib.suppress(zmq.ZMQError):
            self._context.destroy(linger=0)
