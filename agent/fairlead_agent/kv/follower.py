"""Follow the engine's KV events over ZMQ: batches in order, replay of lost ones, and a new beginning after the engine's restart.

vLLM and SGLang number the batches of a process from 0 and keep the last ones for replay. A PUB socket drops messages for a slow or new
subscriber without a sign, so a quiet stream is checked by asking for the replay of the last batch and what follows it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.events import decode_batch

log = logging.getLogger(__name__)

QUIET_SECONDS = 0.5
"""After so long without an event, the agent asks whether the last batches were lost."""
REPLAY_SECONDS = 1.0
"""Longest wait for a replayed batch. The publisher looks for requests ten times a second."""
REMEMBERED_BATCHES = 20_000
"""Digests of applied batches: a late copy is recognised, and so is another process with the same number."""
_END = (-1).to_bytes(8, "big", signed=True)


class NoReplay(Exception):
    """The engine did not answer: it is busy, has ended, or has no replay."""


class Follower:
    """Applies one engine's events to its blocks. Construct it in the event loop."""

    def __init__(self, endpoint: str, replay: str, blocks: EngineBlocks) -> None:
        """`endpoint`, `replay`: as in the engine's `--kv-events-config`; an empty `replay`: the engine has none."""
        self._blocks, self._replay = blocks, replay
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.set(zmq.LINGER, 0)
        self._events.set(zmq.RCVHWM, 0)  # each batch is applied in microseconds
        self._events.set(zmq.SUBSCRIBE, b"")  # every topic: this is one engine
        # vLLM's PUB socket binds such endpoints and connects to all others.
        if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://"):
            self._events.connect(endpoint.replace("*", "127.0.0.1").replace("[::]", "127.0.0.1"))
        else:
            self._events.bind(endpoint)
        self._asker: zmq.asyncio.Socket | None = None
        self._next = 0
        """Number of the next batch."""
        self._seen: OrderedDict[int, int] = OrderedDict()
        self.batches = self.replayed = self.gaps = self.restarts = 0
        self.on_applied: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            if not await self._events.poll(1000 * QUIET_SECONDS):
                await self._catch_up()
                continue
            _, number, payload = (await self._events.recv_multipart())[-3:]
            await self._receive(int.from_bytes(number, "big"), payload)

    def restart(self) -> None:
        """Forget the engine's process: it has ended."""
        self._next = 0
        self._seen.clear()
        self._blocks.forget()

    def close(self) -> None:
        """Close the sockets."""
        self._events.close()
        self._drop_asker()
        self._context.term()

    async def _receive(self, number: int, payload: bytes) -> None:
        if number == self._next:
            self._apply(number, payload)
        elif self._seen.get(number) != xxh3_64_intdigest(payload):  # else a copy of a replayed batch
            await self._catch_up((number, payload))

    async def _catch_up(self, live: tuple[int, bytes] | None = None) -> None:
        """Apply batches that did not arrive. `live`: one that arrived out of order."""
        last = self._next - 1
        try:
            batches = await self._fetch(max(0, last))
        except NoReplay:
            if live is not None:
                self._skip_to([live])
            return
        if last >= 0 and (not batches or batches[0][0] > last or self._seen.get(last) != xxh3_64_intdigest(batches[0][1])):
            is_trimmed = bool(batches) and batches[0][0] > last
            if not is_trimmed:
                log.info("the engine has restarted: its KV events begin again")
                self.restarts += 1
                self.restart()
                batches = await self._fetch_from_start()
        batches = [batch for batch in batches if batch[0] >= self._next]
        self.replayed += len(batches)
        self._skip_to(batches)

    async def _fetch_from_start(self) -> list[tuple[int, bytes]]:
        try:
            return await self._fetch(0)
        except NoReplay:
            return []

    def _skip_to(self, batches: list[tuple[int, bytes]]) -> None:
        """Apply consecutive batches. If some before them are lost, what was known becomes uncertain."""
        for number, payload in batches:
            if number < self._next:
                self._seen.clear()  # without a replay, an earlier number can only be another process
                self.restarts += 1
                self.restart()
            if number != self._next:
                log.warning(
                    "KV events %d to %d are lost: the index gets this worker's blocks again when they are used", self._next, number - 1
                )
                self.gaps += 1
                self._blocks.mark_uncertain()
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        self._next = number + 1
        self._seen[number] = xxh3_64_intdigest(payload)
        if len(self._seen) > REMEMBERED_BATCHES:
            self._seen.popitem(last=False)
        self.batches += 1
        try:
            self._blocks.apply(decode_batch(payload))
        except (ValueError, OverflowError) as error:  # OverflowError: a token id beyond 32 bits
            log.warning("batch %d of KV events is ignored: %s", number, error)
            self._blocks.mark_uncertain()
        self.on_applied()

    async def _fetch(self, first: int) -> list[tuple[int, bytes]]:
        """Return the kept batches from number `first` on. Raises NoReplay."""
        if not self._replay:
            raise NoReplay
        if self._asker is None:
            self._asker = self._context.socket(zmq.DEALER)
            self._asker.set(zmq.LINGER, 0)
            self._asker.connect(self._replay)
        batches: list[tuple[int, bytes]] = []
        try:
            async with asyncio.timeout(REPLAY_SECONDS) as deadline:
                await self._asker.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    number, payload = (await self._asker.recv_multipart())[-2:]
                    if number == _END:
                        return batches
                    batches.append((int.from_bytes(number, "big"), payload))
                    deadline.reschedule(asyncio.get_running_loop().time() + REPLAY_SECONDS)
        except TimeoutError:
            self._drop_asker()  # a late reply must not answer the next request
            raise NoReplay from None
        except asyncio.CancelledError:
            self._drop_asker()
            raise

    def _drop_asker(self) -> None:
        if self._asker is not None:
            self._asker.close()
            self._asker = None
