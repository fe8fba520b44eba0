"""Queries of the index: which workers live, and which of them hold a prompt's prefix."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, TypeVar

import msgspec

from fairlead_index.hashing import hash_bytes
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.replies import UNREADABLE, as_byte_strings, is_sane, unreadable
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts
from fairlead_index.worker_load import WorkerLoad

__all__ = ["IndexReader", "IndexUnavailable", "WorkerState"]

DEADLINE_SECONDS: Final = 0.05
"""Deadline of a call for a request that waits to be routed."""
LATE_SECONDS: Final = 1.0
"""Seconds until a reply counts as lost and its connection as dead."""
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

    async def match(self, hashes: Hashes) -> dict[str, int]:
        """Return exactly how many prompt tokens each live worker holds, by address. Workers that hold none are absent."""
        return self._trusted(await self._call("match", hash_bytes(hashes), parse=_parse_holders))

    async def deepest(self, hashes: Hashes, limit: int, excluded: bytes, included: bytes) -> dict[str, int]:
        """Match about `limit` of the deepest workers that are not `excluded`, and those `included`, both as slots (`FleetReader.slots_of`).

        The cost does not grow with the holders of a system prompt.
        """
        return self._trusted(await self._call("match", hash_bytes(hashes), limit, included, excluded, parse=_parse_holders))

    def _trusted(self, holders: list[tuple[str, int, str]]) -> dict[str, int]:
        return {address: tokens for address, tokens, incarnation in holders if self._trusts(address, incarnation)}

    async def workers(self) -> list[WorkerState]:
        """Return every live worker with its newest load."""
        return [each for each in await self._call("workers", parse=parse_workers) if self._trusts(each.address, each.incarnation)]

    async def recall(self, address: str) -> bool:
        """Make a worker resync, as the index is wrong about its blocks: its next heartbeat has it rejoin and publish a snapshot.

        Return False and do nothing for an unknown worker, or too soon after another recall.
        """
        return await self._call("recall", address, parse=lambda reply: reply[0] == b"OK")

    async def close(self) -> None:
        """Close the connections. Does not raise for an unreachable Redis."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    async def _call(self, name: str, *args: bytes | str | int, parse: Callable[[list[Any]], _Parsed]) -> _Parsed:
        """Run one script and return its parsed reply."""
        if not self._backoff.may_try():
            raise IndexUnavailable(f"Redis does not answer: {self._backoff.reason}")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                reply = await self._scripts.call(name, *args)
            parsed = parse(reply)
        except (*REDIS_ERRORS, *UNREADABLE) as error:
            if isinstance(error, UNREADABLE):
                error = unreadable(f"the reply of {name}", error)
            reason = str(error) or f"no answer within {self._deadline * 1000:.0f} ms"
            late = time.monotonic() - began >= 0.9 * self._deadline
            (self._backoff.record_timeout if late else self._backoff.record_failure)(reason)
            raise IndexUnavailable(f"Redis does not answer: {reason}") from error
        self._backoff.reset()
        return parsed


def batched(flat: list[Any], size: int) -> Iterator[list[Any]]:
    return (flat[at : at + size] for at in range(0, len(flat), size))


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
