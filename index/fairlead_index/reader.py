"""The router's side of the index: find the worker that starts a prompt soonest."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from struct import Struct
from typing import Any, Final, TypeVar

import msgspec

from fairlead_index.hashing import hash_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.replies import UNREADABLE, as_byte_strings, is_sane, unreadable
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_index.worker_load import WorkerLoad

__all__ = ["Candidate", "IndexReader", "IndexUnavailable", "Route", "WorkerState"]

MAX_CANDIDATES: Final = 8
MAX_QUERIES: Final = 3  # per prompt, while the best candidates are untrusted records
MAX_DISTRUSTED: Final = 256  # records that later calls exclude
DISTRUST_SECONDS: Final = 2.0
DEADLINE_SECONDS: Final = 0.05
"""Deadline of a call for a request that waits to be routed."""
LATE_SECONDS: Final = 1.0
"""Seconds until a reply counts as lost and its connection as dead. A reply to `route` after the deadline still names a reservation."""
_CANDIDATE: Final = Struct("<qq?8s2s")
"""Before each address in the reply of `route`: cached tokens, expected microseconds, whether it fits, epoch, slot."""
MAX_TOKENS: Final = 1 << 32
"""Bound of cached tokens and of a block size in a record."""
MAX_SLOTS: Final = 1 << 16
WORKER_FIELDS: Final = 18
"""Fields of a worker in the reply of `workers`."""
MIN_RATE: Final = 1e-3
"""Least prefill rate of a record, tokens per second; a quotient by a smaller one is not finite."""
_HOLDER: Final = Struct("<q8s")
"""Before each address in the reply of `match`: cached tokens, epoch."""
Hashes = Sequence[int]  # fastest as the array("Q") that `block_hashes` returns
_Parsed = TypeVar("_Parsed")
Trust = Callable[[str, str], bool]
"""Takes address and incarnation; returns whether such a record may be used. Any client that can write to Redis can forge records."""


class IndexUnavailable(Exception):
    """The index did not reply in time. Route without it: it never decides whether a request is served."""


class Candidate(msgspec.Struct, frozen=True):
    """A worker for one prompt. `cached_tokens`: prompt tokens expected in its cache. `expected_seconds`: estimated TTFT."""

    address: str
    cached_tokens: int
    expected_seconds: float
    fits: bool = True
    """Whether its free KV pages hold the uncached tokens."""
    incarnation: str = ""
    """The run of the worker that the record describes (`IndexWriter.incarnation`)."""
    slot: bytes = b""


class Route(msgspec.Struct, frozen=True):
    """Candidates, best first (none if no worker is live or all are excluded). `reservation` counts as load of the first until released."""

    candidates: list[Candidate]
    reservation: bytes


class WorkerState(msgspec.Struct, frozen=True):
    """A live worker. `lease_seconds`: rest of its lease. `reserved_tokens`: reserved at it and not in its load yet."""

    pod: str
    address: str
    block_tokens: int
    revision: str
    lease_seconds: float
    reserved_tokens: int
    load: WorkerLoad
    slot: int
    """Number of the incarnation's place in Redis. A restarted pod gets another slot."""
    incarnation: str = ""
    load_age: float = 0.0
    """Seconds since the worker measured its load."""


class IndexReader:
    """Reads the index of one namespace. Every call ends within `deadline` seconds, with a reply or with IndexUnavailable.

    After a failure calls fail immediately, without network traffic, until the backoff is over. Then one call tries again.
    Raises ValueError for a url or a namespace that can never work.
    """

    def __init__(
        self,
        redis: RedisAccess | str,
        namespace: str,
        deadline: float = DEADLINE_SECONDS,
        trusts: Trust = lambda address, incarnation: True,
    ) -> None:
        """`trusts`: which records count. Replies exclude the others."""
        self._scripts = Scripts(redis, namespace, timeout=max(deadline, LATE_SECONDS), shared=True)
        self._deadline, self._trusts = deadline, trusts
        self._backoff = Backoff()
        self._distrusted: dict[bytes, tuple[Candidate, float]] = {}
        """By slot: the record, and the time until which it is excluded."""
        self._late_releases: set[asyncio.Task[None]] = set()

    async def route(self, hashes: Hashes, prompt_tokens: int, exclude: Collection[str] = ()) -> Route:
        """Return workers for a prompt by expected TTFT, and a reservation at the first.

        If an untrusted record comes first, its reservation is released and the query repeated without such records, MOST_ASKS queries at
        most. No candidates: none is trusted.
        """
        packed, give_up = hash_bytes(hashes), time.monotonic() + self._deadline
        for _ in range(MAX_QUERIES):
            route = await self._route(packed, prompt_tokens, exclude, give_up)
            trusted = [each for each in route.candidates if self._trusts(each.address, each.incarnation)]
            if len(trusted) == len(route.candidates):
                return route
            until, before = time.monotonic() + DISTRUST_SECONDS, len(self._distrusted)
            for each in route.candidates:
                if each not in trusted and len(self._distrusted) < MAX_DISTRUSTED:
                    self._distrusted[each.slot] = each, until
            if trusted and trusted[0] is route.candidates[0]:
                return Route(trusted, route.reservation)
            if route.reservation:
                await self._call("release", route.reservation, parse=as_is, give_up=give_up)
            if len(self._distrusted) == before:
                break  # more untrusted records than MOST_DISTRUSTED
        return Route([], b"")

    async def _route(self, packed: bytes, prompt_tokens: int, exclude: Collection[str], give_up: float) -> Route:
        slots = self._excluded_slots() if self._distrusted else b""
        id, parse = os.urandom(8), partial(_parse_route, prompt_tokens=prompt_tokens)
        return await self._call("route", packed, prompt_tokens, id, MAX_CANDIDATES, slots, *exclude, parse=parse, give_up=give_up)

    def _excluded_slots(self) -> bytes:
        """Return the slots of records that were untrusted recently and still are."""
        now = time.monotonic()
        self._distrusted = {
            slot: (each, until)
            for slot, (each, until) in self._distrusted.items()
            if until > now and not self._trusts(each.address, each.incarnation)
        }
        return b"".join(self._distrusted)

    async def match(self, hashes: Hashes) -> dict[str, int]:
        """Return exactly how many prompt tokens each live worker holds, by address. Workers that hold none are absent."""
        holders = await self._call("match", hash_bytes(hashes), parse=_parse_holders)
        return {address: tokens for address, tokens, incarnation in holders if self._trusts(address, incarnation)}

    async def release(self, reservation: bytes) -> None:
        """Release a reservation, at the first token or on failure. An unreleased reservation expires."""
        if reservation:
            await self._call("release", reservation, parse=as_is)

    async def workers(self) -> list[WorkerState]:
        """Return every live worker with its newest load."""
        return [each for each in await self._call("workers", parse=parse_workers) if self._trusts(each.address, each.incarnation)]

    async def recall(self, address: str) -> bool:
        """Make a worker resync, as the index is wrong about its blocks: its next heartbeat has it rejoin and publish a snapshot.

        Return False and do nothing for an unknown worker, or too soon after another recall.
        """
        return await self._call("recall", address, parse=lambda reply: reply[0] == b"OK")

    @property
    def is_unavailable(self) -> bool:
        """Whether calls fail immediately, as Redis has not replied for a while. One late reply is not enough."""
        return self._backoff.is_active

    async def close(self) -> None:
        """Close the connections. Does not raise for an unreachable Redis."""
        for task in self._late_releases:
            task.cancel()
        await asyncio.gather(*self._late_releases, return_exceptions=True)
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    async def _call(self, name: str, *args: bytes | str | int, parse: Callable[[list[Any]], _Parsed], give_up: float = 0.0) -> _Parsed:
        """Run one script and return its parsed reply. `give_up`: deadline in monotonic seconds, shared by several calls of one query."""
        if not self._backoff.may_try():
            raise IndexUnavailable(f"Redis does not answer: {self._backoff.reason}")
        began = time.monotonic()
        deadline = max(0.0, give_up - began) if give_up else self._deadline
        try:
            async with asyncio.timeout(deadline):
                reply = await self._scripts.call(name, *args, on_late=self._release_late if name == "route" else None)
            parsed = parse(reply)
        except (*REDIS_ERRORS, *UNREADABLE) as error:
            if isinstance(error, UNREADABLE):
                error = unreadable(f"the reply of {name}", error)
            reason = str(error) or f"no answer within {self._deadline * 1000:.0f} ms"
            late = time.monotonic() - began >= 0.9 * deadline
            (self._backoff.record_timeout if late else self._backoff.record_failure)(reason)
            raise IndexUnavailable(f"Redis does not answer: {reason}") from error
        self._backoff.reset()
        return parsed

    def _release_late(self, reply: Any) -> None:
        """Release the reservation of a `route` whose caller left before the reply."""
        if isinstance(reply, list) and reply and reply[0] and isinstance(reply[0], bytes):
            task = asyncio.create_task(self._release_quietly(reply[0]))
            self._late_releases.add(task)
            task.add_done_callback(self._late_releases.discard)

    async def _release_quietly(self, reservation: bytes) -> None:
        with contextlib.suppress(*REDIS_ERRORS):  # it expires
            await self._scripts.call("release", reservation)


def as_is(reply: list[Any]) -> list[Any]:
    return reply


def batched(flat: list[Any], size: int) -> Iterator[list[Any]]:
    return (flat[at : at + size] for at in range(0, len(flat), size))


def _parse_route(reply: list[Any], prompt_tokens: int) -> Route:
    reservation, *packed = as_byte_strings(reply, "the reply of route", least=1)
    return Route([_parse_candidate(each, prompt_tokens) for each in packed[:MAX_CANDIDATES]], reservation)


def _parse_candidate(packed: bytes, prompt_tokens: int) -> Candidate:
    cached, microseconds, fits, epoch, slot = _CANDIDATE.unpack_from(packed)
    if not 0 <= cached <= prompt_tokens:  # forged
        cached = min(max(0, cached), prompt_tokens)
    seconds = microseconds / 1e6 if microseconds > 0 else 0.0
    return Candidate(_decode(packed[_CANDIDATE.size :]), cached, seconds, fits, epoch.hex(), slot)


def _parse_holders(reply: list[Any]) -> list[tuple[str, int, str]]:
    return [unpack_holder(packed) for packed in as_byte_strings(reply, "the reply of match", most=MAX_SLOTS)]


def unpack_holder(packed: bytes) -> tuple[str, int, str]:
    """Return address, cached tokens and incarnation of one entry of `match`'s reply."""
    tokens, epoch = _HOLDER.unpack_from(packed)
    return _decode(packed[_HOLDER.size :]), tokens if 0 <= tokens < MAX_TOKENS else 0, epoch.hex()


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")  # A forged record may hold any bytes.


def parse_workers(reply: list[Any]) -> list[WorkerState]:
    """Parse the reply of the script `workers`. Forged records are left out. Raises BadReply, or an error that `checked` turns into it."""
    rows = batched(as_byte_strings(reply, "the reply of workers", most=WORKER_FIELDS * MAX_SLOTS), WORKER_FIELDS)
    return [state for row in rows if (state := _parse_worker(row)) is not None]


def _parse_worker(row: list[bytes]) -> WorkerState | None:
    """Return one worker; None if a number of its record is not finite, negative or too large for one."""
    pod, address, revision, epoch = row[0], row[1], row[3], row[17]
    numbers = [float(value) for value in (row[2], row[4], row[5], *row[6:17])]
    block_tokens, lease, reserved, *load, age, slot = numbers
    running, waiting, backlog, rate, step, free, total, page_size, arrivals = load
    is_forged = min(load) < 0 or not (0 <= slot < MAX_SLOTS and 1 <= block_tokens < MAX_TOKENS) or 0 < rate < MIN_RATE
    if is_forged or not all(map(is_sane, (*load, lease, age))):
        return None
    return WorkerState(
        pod=_decode(pod),
        address=_decode(address),
        block_tokens=int(block_tokens),
        revision=_decode(revision),
        lease_seconds=lease,
        reserved_tokens=int(reserved) if is_sane(reserved) else 0,
        load=WorkerLoad(
            running=int(running),
            waiting=int(waiting),
            backlog_tokens=int(backlog),
            prefill_rate=rate,
            step_seconds=step,
            pages_free=int(free),
            pages_total=int(total),
            page_size=int(page_size),
            arrival_rate=arrivals,
        ),
        slot=int(slot),
        load_age=age,
        incarnation=epoch.hex(),
    )
