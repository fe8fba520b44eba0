"""The living workers, their loads and what all routers have promised them, in a router's own memory: for choosing without a round trip.

A choice is entered at once and told to the index a moment later, together with the others made meanwhile; the answer brings what other
routers entered. So routers in a burst see each other's choices within a round trip, and their own at once. A look at everything four times
a second puts right whatever was missed.
"""

import asyncio
import contextlib
import logging
import os
import struct
import time
from typing import Final

from fairlead_index.mirror.reservations import NOWHERE, Ledger, Position, ReservationChange
from fairlead_index.mirror.start_order import StartOrder
from fairlead_index.reader import Trust, WorkerState, parse_workers
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_index.score import PRIOR_RATE, ScoredWorker, ready_key

__all__ = ["FleetReader"]

LOOK_SECONDS: Final = 0.25
FRESH_SECONDS: Final = 2.0
LONGEST_SECONDS: Final = 60.0  # as in heartbeat.lua
MOST_CHANGES: Final = 500
CHANGE_BYTES: Final = 19

log = logging.getLogger(__name__)


class FleetReader:
    """Follows one namespace. Call it from one event loop; only `close` waits.

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
        """`trusts`: whose records count, asked at each look."""
        self._trusts = trusts
        self._scripts = Scripts(redis, namespace, timeout=call_seconds)
        self._router = os.urandom(8)
        self._ledger = Ledger()
        self._outbox: list[tuple[bytes, ReservationChange]] = []
        self._open: dict[bytes, float] = {}  # since when
        self._heard = b""
        self._seen: dict[str, tuple[bytes, WorkerState]] = {}  # by address
        self._scored: dict[str, ScoredWorker] = {}
        self._addresses: dict[bytes, str] = {}  # by slot
        self.soonest = StartOrder()
        """Addresses of the workers, those first that could begin a prompt soonest; claims count at once."""
        self._looked_at = float("-inf")
        self._answers = False
        self._look_at = 0.0
        self._backoff = Backoff(first=0.05, longest=1.0)
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, in the running event loop. Once."""
        if self._task is not None:
            raise RuntimeError("the fleet's reader was started before")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="index-fleet")

    @property
    def is_fresh(self) -> bool:
        """Whether Redis answers, so that what is said here is of now. Else choose by what the workers say of themselves."""
        return self._answers and time.monotonic() - self._looked_at < FRESH_SECONDS

    @property
    def last_read_at(self) -> float:
        """When the workers were last read, monotonic seconds: another number, another set of workers perhaps."""
        return self._looked_at

    @property
    def workers(self) -> dict[str, ScoredWorker]:
        """Living workers by address, as of the last look; `owed` and `load_age` are brought up to now by `refresh`. Not to be kept."""
        return self._scored

    @property
    def capacity(self) -> int:
        """Blocks that all workers could hold in their pages."""
        return sum(s.load.pages_total * s.load.page_size // max(1, s.block_tokens) for _, s in self._seen.values())

    def refresh(self, scored: ScoredWorker) -> None:
        slot, state = self._seen[scored.address]
        scored.reserved_tokens = self._ledger.get(slot)
        scored.load_age = state.load_age + time.monotonic() - self._looked_at

    def read_soon(self) -> None:
        """Who is trusted has changed: read the workers now."""
        self._look_at = 0.0
        self._wake.set()

    def reserve(self, address: str, tokens: float) -> bytes:
        """Promises a worker `tokens` of work. The reservation, empty for a worker that the index does not know."""
        seen = self._seen.get(address)
        if seen is None or not self.is_fresh:
            return b""
        reservation = seen[0] + os.urandom(8) + struct.pack("<d", tokens)
        self._open[reservation] = time.monotonic()
        self._enter(b"+", reservation, tokens)
        return reservation

    def release(self, reservation: bytes) -> bool:
        """Takes it back, at the first token or on failure. False when it is none of ours."""
        if self._open.pop(reservation, None) is None:
            return False
        self._enter(b"-", reservation, -struct.unpack_from("<d", reservation, 10)[0])
        return True

    async def close(self) -> None:
        """Tells what is left and stops. Does not raise for a Redis that is away."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=1.0)
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    def _enter(self, sign: bytes, reservation: bytes, tokens: float) -> None:
        change = self._note(reservation[:2], tokens)
        self._outbox.append((sign + reservation, change))
        self._wake.set()

    def _note(self, slot: bytes, tokens: float, position: Position | None = None) -> ReservationChange:
        address = self._addresses.get(slot)
        if address is not None and tokens > 0:  # not taken back: by then it was worked off, or the next look says so
            self.soonest.move(address, tokens / (self._scored[address].rate or PRIOR_RATE))
        return self._ledger.record(slot, tokens, position)

    async def _run(self) -> None:
        while not self._closing or (self._outbox and self._answers):
            try:
                await self._turn()
            except REDIS_ERRORS as error:
                await self._away(str(error) or type(error).__name__)
            except Exception as error:  # our own fault: choices go on by what the workers say of themselves
                log.exception("reading the fleet failed")
                await self._away(repr(error))

    async def _away(self, reason: str) -> None:
        self._answers = False
        self._outbox.clear()  # reservations are worth nothing by the time that Redis is back
        self._open.clear()
        self._ledger.reconcile({}, (2**64, 0))
        self._heard = b""
        self._look_at = 0.0
        if not self._closing:
            await asyncio.sleep(self._backoff.record_failure(reason))

    async def _turn(self) -> None:
        """Look if it is time, tell what is in the outbox, wait for more."""
        looking = time.monotonic() >= self._look_at
        if self._outbox or looking:
            position = await self._tell()
            if looking:
                await self._look(position)
            self._backoff.reset()
            self._answers = True
        if not self._outbox and not self._closing:
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._look_at - time.monotonic())):
                    await self._wake.wait()

    async def _tell(self) -> Position:
        sent, self._outbox = self._outbox[:MOST_CHANGES], self._outbox[MOST_CHANGES:]
        for _, change in sent:
            change.position = NOWHERE  # if the answer is lost, the next look tells
        reply: list[bytes] = await self._scripts.call("claim", self._router, self._heard, *(text for text, _ in sent))
        self._heard, position = reply[0], _position(reply[0])
        for _, change in sent:
            change.position = position
        for packed in reply[1:]:
            for at in range(0, len(packed), CHANGE_BYTES):
                tokens = struct.unpack_from("<d", packed, at + 11)[0]
                self._note(packed[at + 1 : at + 3], tokens if packed[at : at + 1] == b"+" else -tokens, position)
        return position

    async def _look(self, position: Position) -> None:
        """Everything anew. What others claim between the stream's end and this look counts twice, until the next one."""
        told = parse_workers(await self._scripts.call("workers"))
        states = [state for state in told if self._trusts(state.address, state.incarnation)]
        self._looked_at = time.monotonic()
        self._look_at = self._looked_at + LOOK_SECONDS
        self._seen = {state.address: (state.slot.to_bytes(2, "big"), state) for state in states}
        self._scored = {state.address: _scored(state) for state in states}
        self._addresses = {slot: address for address, (slot, _) in self._seen.items()}
        oldest = self._looked_at - LONGEST_SECONDS  # of callers that never release
        self._open = {reservation: since for reservation, since in self._open.items() if since > oldest}
        self._ledger.reconcile({slot: float(state.reserved_tokens) for slot, state in self._seen.values()}, position)
        for scored in self._scored.values():
            self.refresh(scored)
        self.soonest.replace({address: ready_key(scored, self._looked_at) for address, scored in self._scored.items()})


def _position(text: bytes) -> Position:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)


def _scored(state: WorkerState) -> ScoredWorker:
    load = state.load
    return ScoredWorker(
        address=state.address,
        block_tokens=state.block_tokens,
        backlog=load.backlog_tokens,
        rate=load.prefill_rate,
        step=load.step_seconds,
        pages_free=load.pages_free,
        pages_total=load.pages_total,
        page_size=load.page_size,
    )
