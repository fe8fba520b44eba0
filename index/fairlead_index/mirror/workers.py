"""Live workers, their loads and the reservations of all routers, in a router's memory.

A choice counts here immediately. It is published to the index a moment later, in a batch, and the reply brings the other routers'
reservations. So in a burst each router sees the others' choices within a round trip. A full read four times a second corrects what was
missed; of more than 1,250 workers it comes less often.
"""

import asyncio
import contextlib
import logging
import os
import struct
import time
from collections.abc import Iterable
from typing import Final

from fairlead_index.mirror.reservations import START, Position, ReservationChange, ReservedTokens
from fairlead_index.mirror.start_order import StartOrder
from fairlead_index.reader import WORKER_FIELDS, Trust, WorkerState, parse_workers
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.replies import as_byte_strings, checked, is_sane
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_index.score import ScoredWorker

__all__ = ["FleetReader"]

READ_SECONDS: Final = 0.25
WORKERS_PER_SECOND: Final = 5000
"""Workers read in a second: a twentieth of a core. Changes of reservations come in between."""
SLICE: Final = 200
"""Workers parsed at once, in a millisecond and a half."""
FRESH_SECONDS: Final = 2.0
MAX_RESERVATION_SECONDS: Final = 60.0  # as in heartbeat.lua
MAX_CHANGES: Final = 500
CHANGE_BYTES: Final = 19

log = logging.getLogger(__name__)


class FleetReader:
    """Follows the workers of one namespace. Call it from one event loop; only `close` waits.

    Raises ValueError for a url or a namespace that can never work.
    """

    def __init__(
        self,
        redis: RedisAccess | str,
        namespace: str,
        *,
        call_seconds: float = 1.0,
        trusts: Trust = lambda address, incarnation: True,
    ) -> None:
        """`trusts`: which records count, evaluated at each full read."""
        self._trusts = trusts
        self._scripts = Scripts(redis, namespace, timeout=call_seconds)
        self._router = os.urandom(8)
        self._reserved = ReservedTokens()
        self._outbox: list[tuple[bytes, ReservationChange]] = []
        self._open: dict[bytes, float] = {}  # reservation -> monotonic time
        self._stream_position = b""
        self._states: dict[str, tuple[bytes, WorkerState]] = {}  # by address
        self._scored: dict[str, ScoredWorker] = {}
        self._addresses: dict[bytes, str] = {}  # by slot
        self.soonest = StartOrder()
        """Addresses of the workers, sorted by how soon each can start a prompt. Reservations count immediately."""
        self.others_changed_at = time.monotonic()
        """When another router last reserved or released, as far as is known here, monotonic seconds; at first now, as one may have."""
        self._read_at = float("-inf")
        self._is_answering = False
        self._next_read_at = 0.0
        self._read_seconds = READ_SECONDS
        self._backoff = Backoff(first=0.05, longest=1.0)
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the running event loop. Raises RuntimeError on a second call."""
        if self._task is not None:
            raise RuntimeError("the fleet's reader was started before")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="index-fleet")

    @property
    def is_fresh(self) -> bool:
        """Whether Redis replies, so that this data is current. Otherwise choose by the loads that workers report themselves."""
        return self._is_answering and time.monotonic() - self._read_at < max(FRESH_SECONDS, 3 * self._read_seconds)

    @property
    def was_tried(self) -> bool:
        """Whether Redis has answered or failed at all."""
        return self._is_answering or self._backoff.is_active

    @property
    def reason(self) -> str:
        """Why Redis is unavailable, in plain text."""
        return self._backoff.reason or "Redis does not answer"

    @property
    def workers(self) -> dict[str, ScoredWorker]:
        """Live workers by address, as of the last full read. `refresh` updates `reserved_tokens` and `load_age`. Do not keep it."""
        return self._scored

    @property
    def capacity(self) -> int:
        """Blocks that all workers can hold in their pages."""
        return sum(s.load.pages_total * s.load.page_size // max(1, s.block_tokens) for _, s in self._states.values())

    def refresh(self, scored: ScoredWorker) -> None:
        slot, state = self._states[scored.address]
        scored.reserved_tokens = self._reserved.get(slot)
        scored.load_age = state.load_age + time.monotonic() - self._read_at

    def tokens_ahead(self, address: str) -> float:
        """Return the prompt tokens before a new prompt at the worker, with all routers' reservations; 0 if Redis does not answer."""
        scored = self._scored.get(address)
        if scored is None or not self.is_fresh:
            return 0.0
        self.refresh(scored)
        return scored.tokens_ahead

    def slots_of(self, addresses: Iterable[str]) -> bytes:
        """Return the slots of those workers that the index knows, packed for `IndexReader.deepest`."""
        return b"".join(self._states[address][0] for address in addresses if address in self._states)

    def read_soon(self) -> None:
        """Read the workers now, as trust has changed."""
        self._next_read_at = 0.0
        self._wake.set()

    def reserve(self, address: str, tokens: float) -> bytes:
        """Reserve `tokens` of work at a worker. Return the reservation, empty for an unknown worker."""
        seen = self._states.get(address)
        if seen is None or not self.is_fresh:
            return b""
        reservation = seen[0] + os.urandom(8) + struct.pack("<d", tokens)
        self._open[reservation] = time.monotonic()
        self._queue(b"+", reservation, tokens)
        return reservation

    def release(self, reservation: bytes) -> bool:
        """Release a reservation, at the first token or on failure. Return False if it is not from here."""
        if self._open.pop(reservation, None) is None:
            return False
        self._queue(b"-", reservation, -struct.unpack_from("<d", reservation, 10)[0])
        return True

    async def close(self) -> None:
        """Publish pending changes and stop. Does not raise for an unreachable Redis."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=1.0)
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    def _queue(self, sign: bytes, reservation: bytes, tokens: float) -> None:
        change = self._record(reservation[:2], tokens)
        self._outbox.append((sign + reservation, change))
        self._wake.set()

    def _record(self, slot: bytes, tokens: float, position: Position | None = None) -> ReservationChange:
        address = self._addresses.get(slot)
        if address is not None and tokens > 0:  # a release moves nothing: by then the work is done, or the next read shows it
            self.soonest.move(address, tokens / self._scored[address].load.rate)
        return self._reserved.record(slot, tokens, position)

    async def _run(self) -> None:
        while not self._closing or (self._outbox and self._is_answering):
            try:
                with checked("the workers in Redis"):
                    await self._run_once()
            except REDIS_ERRORS as error:
                await self._handle_failure(str(error) or type(error).__name__)
            except Exception as error:  # a bug here: choices continue by the loads that workers report themselves
                log.exception("reading the fleet failed")
                await self._handle_failure(repr(error))

    async def _handle_failure(self, reason: str) -> None:
        self._is_answering = False
        self._outbox.clear()  # reservations are outdated when Redis is back
        self._open.clear()
        self._reserved.reconcile({}, (2**64, 0))
        self._stream_position = b""
        self._next_read_at = 0.0
        if not self._closing:
            await asyncio.sleep(self._backoff.record_failure(reason))

    async def _run_once(self) -> None:
        """Read all workers when due, publish the outbox, wait for more."""
        is_due = time.monotonic() >= self._next_read_at
        if self._outbox or is_due:
            position = await self._publish()
            if is_due:
                await self._read_workers(position)
            self._backoff.reset()
            self._is_answering = True
        if not self._outbox and not self._closing:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._next_read_at - time.monotonic())):
                    await self._wake.wait()

    async def _publish(self) -> Position:
        sent, self._outbox = self._outbox[:MAX_CHANGES], self._outbox[MAX_CHANGES:]
        for _, change in sent:
            change.position = START  # if the reply is lost, the next read shows it
        reply = await self._scripts.call("reserve", self._router, self._stream_position, *(text for text, _ in sent))
        self._stream_position, *changes = as_byte_strings(reply, "the reply of reserve", least=1)
        position = _parse_position(self._stream_position)
        for _, change in sent:
            change.position = position
        if changes:
            self.others_changed_at = time.monotonic()
        for packed in changes:
            for at in range(0, len(packed), CHANGE_BYTES):
                tokens = struct.unpack_from("<d", packed, at + 11)[0]
                if is_sane(tokens):
                    self._record(packed[at + 1 : at + 3], tokens if packed[at : at + 1] == b"+" else -tokens, position)
        return position

    async def _read_workers(self, position: Position) -> None:
        """Read all workers. Reservations by others between the stream's end and this read count twice until the next one."""
        rows = await self._scripts.call("workers")
        read_at, states = time.monotonic(), list[WorkerState]()
        for at in range(0, len(rows), SLICE * WORKER_FIELDS):
            listed = parse_workers(rows[at : at + SLICE * WORKER_FIELDS])
            states += (state for state in listed if self._trusts(state.address, state.incarnation))
            await asyncio.sleep(0)  # other work runs: 5,000 workers take 40 ms
        self._read_at = read_at
        self._read_seconds = max(READ_SECONDS, len(states) / WORKERS_PER_SECOND)
        self._next_read_at = self._read_at + self._read_seconds
        self._states = {state.address: (state.slot.to_bytes(2, "big"), state) for state in states}
        self._scored = {state.address: ScoredWorker(state.address, state.block_tokens, state.load) for state in states}
        self._addresses = {slot: address for address, (slot, _) in self._states.items()}
        oldest = self._read_at - MAX_RESERVATION_SECONDS  # expires reservations that callers never release
        self._open = {reservation: since for reservation, since in self._open.items() if since > oldest}
        self._reserved.reconcile({slot: float(state.reserved_tokens) for slot, state in self._states.values()}, position)
        for scored in self._scored.values():
            self.refresh(scored)
        self.soonest.replace({address: scored.ready_key(self._read_at) for address, scored in self._scored.items()})


def _parse_position(text: bytes) -> Position:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)
