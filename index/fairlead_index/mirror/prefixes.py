"""The index in a router's own memory: follows the log of changes, answers in microseconds, and goes on answering while Redis is away."""

import asyncio
import contextlib
import logging
import struct
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from fairlead_index.hashing import hashes_from_bytes
from fairlead_index.mirror.prefix_table import PrefixTable
from fairlead_index.reader import IndexUnavailable, Trust
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts

__all__ = ["MirrorReader", "MirrorStats"]

LISTEN_SECONDS: Final = 30.0  # a tenth of how long changes are logged for mirrors that say nothing
LOGGED_SECONDS: Final = 300
PULSE_SECONDS: Final = 0.25  # how late a lease that ran out is seen
BLOCK_MS: Final = 100
RECORDS: Final = 64  # read at once: 1,300 blocks at most, a millisecond of the event loop; 8,500 while a worker tells its snapshot
BUCKETS: Final = 24  # of the snapshot, read at once: 2,304 blocks in full runs, a millisecond or so of the event loop
PAGES: Final = 64  # of so many buckets, between two looks into the log
READERS: Final = 2  # while one's page is decoded, the other's is on its way
CALL_SECONDS: Final = 2.0
MOST_LEASES: Final = 8 * 65536 - 1  # last byte of `leases` that a slot can have: whoever may write it can make it 512 MB long
WIDE: Final = 128  # as the scripts have it

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MirrorStats:
    """For /metrics. `following` is false while Redis is away or a snapshot is loading: answers are of the last picture then."""

    following: bool = False
    records: int = 0
    snapshots: int = 0
    errors: int = 0
    blocks: int = 0
    workers: int = 0
    last_error: str = ""


class _Lost(Exception):
    """What is in the log does not continue our picture: records were trimmed, or this is another Redis than it was."""


@dataclass(slots=True)
class _Picture:
    """The table, and how far it has followed which log. `last` is the id of the newest record in it, None before the first."""

    table: PrefixTable
    birth: bytes | None
    position: int
    last: bytes | None


class MirrorReader:
    """Mirrors one namespace. Call it from one event loop; `match` needs no awaiting.

    Raises ValueError for a url or a namespace that can never work.
    """

    def __init__(
        self,
        redis: RedisAccess | str,
        namespace: str,
        *,
        call_seconds: float = CALL_SECONDS,
        trusts: Trust = lambda address, incarnation: True,
    ) -> None:
        """`trusts`: whose records count, asked at each pulse."""
        self._trusts = trusts
        self._scripts = Scripts(redis, namespace, timeout=call_seconds)
        self._picture: _Picture | None = None
        self._lost = False  # the picture cannot be continued: answer from it until there is a new one
        self._following = False
        self._closing = False
        self._stats = MirrorStats()
        self._backoff = Backoff(first=0.05, longest=1.0)
        self._pulse_at = 0.0
        self._listen_at = 0.0
        self._ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins, in the running event loop. Once."""
        if self._task is not None:
            raise RuntimeError("the mirror was started before")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="index-mirror")

    async def ready(self, timeout: float) -> None:
        """Returns when there is a picture to answer from. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            await self._ready.wait()

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Tokens of the prompt that each living worker holds; workers that hold none are left out.

        Exact as of the last record read. While Redis is away: as of then, and whoever lived then counts as living.
        Raises IndexUnavailable before the first picture.
        """
        if self._picture is None:
            raise IndexUnavailable(f"no picture of the index yet: {self._stats.last_error or 'loading'}")
        return self._picture.table.match(hashes)

    def deepest(self, hashes: Sequence[int], limit: int, may: Container[str], also: Iterable[str] = ()) -> dict[str, int]:
        """As `match`, of the addresses in `may` only about `limit`, the deepest first, and of `also`: costs the same however many hold
        a system prompt."""
        if self._picture is None:
            raise IndexUnavailable(f"no picture of the index yet: {self._stats.last_error or 'loading'}")
        return self._picture.table.deepest(hashes, limit, may, also)

    def block_tokens_of(self, address: str) -> int:
        """Tokens of a block of the worker at an address; 0: unknown."""
        return self._picture.table.block_tokens_of(address) if self._picture is not None else 0

    def check_soon(self) -> None:
        """Who is trusted has changed: see within BLOCK_MS."""
        self._pulse_at = 0.0

    def unique_shares(self) -> dict[str, float]:
        """Of the blocks of each living worker, by address, the share that no other living one holds; empty before the first picture."""
        return self._picture.table.unique_shares() if self._picture is not None else {}

    @property
    def stats(self) -> MirrorStats:
        self._stats.following = self._following
        if self._picture is not None:
            self._stats.blocks, self._stats.workers = len(self._picture.table), self._picture.table.num_incarnations
        return self._stats

    async def close(self) -> None:
        """Stops. Does not raise for a Redis that is away."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    async def _run(self) -> None:
        while not self._closing:
            try:
                if self._picture is None or self._lost:
                    self._picture = await self._load()
                    self._lost = False
                    self._ready.set()
                await self._turn(self._picture)
                self._backoff.reset()
            except _Lost as lost:
                log.warning("mirror reads the index anew: %s", lost)
                await self._failed(str(lost), lost=True)
            except REDIS_ERRORS as error:
                await self._failed(str(error) or type(error).__name__, lost=False)
            except Exception as error:  # our own fault: the last picture still answers
                log.exception("index mirror failed")
                await self._failed(repr(error), lost=True)

    async def _failed(self, reason: str, *, lost: bool) -> None:
        self._following = False
        self._lost = self._lost or lost
        self._pulse_at = self._listen_at = 0.0  # whoever answers next may be another server
        self._stats.errors += 1
        self._stats.last_error = reason
        await asyncio.sleep(self._backoff.record_failure(reason))

    async def _turn(self, picture: _Picture) -> None:
        """Takes the pulse when it is time, then what is new in the log, waiting a moment for it."""
        if time.monotonic() >= self._pulse_at:
            await self._pulse(picture)
            self._pulse_at = time.monotonic() + PULSE_SECONDS
        self._following = True
        await self._read(picture, BLOCK_MS)
        picture.table.sweep()

    async def _pulse(self, picture: _Picture) -> None:
        """Whether the log still continues our picture, and who is under a lease."""
        key = self._scripts.key
        if time.monotonic() >= self._listen_at:
            await self._listen()
        last = picture.last or b"-"
        (birth, logged, told), leases, now, ours, next_ones = await self._scripts.redis.transaction(
            [
                ("HMGET", key("meta"), "birth", "logged", "told"),
                ("GETRANGE", key("leases"), 0, MOST_LEASES),
                ("TIME",),
                ("XRANGE", key("log"), last, last),
                ("XRANGE", key("log"), b"(" + last if picture.last else last, "+", "COUNT", 1),
            ]
        )
        if birth != picture.birth:
            raise _Lost("the namespace is new, or Redis was emptied")
        read_is_there = picture.last is None or bool(ours)
        count = int(logged or 0)
        if told != picture.last and (not read_is_there or count < picture.position):  # else: nothing new, log or no log
            raise _Lost(f"record {picture.position}, which we read, is not there")
        if count > picture.position and (not next_ones or _number(next_ones[0][0]) != picture.position + 1):
            raise _Lost(f"record {picture.position + 1} was not logged, or is gone")
        picture.table.renew(leases or b"", _milliseconds(now), self._trusts)

    async def _listen(self) -> None:
        """Has changes logged, for us to follow."""
        await self._scripts.redis.execute("SET", self._scripts.key("r:mirrored"), 1, "EX", LOGGED_SECONDS)
        self._listen_at = time.monotonic() + LISTEN_SECONDS

    async def _read(self, picture: _Picture, block_ms: int | None) -> int:
        """Applies the next records, in order and without a gap. Returns how many there were."""
        after = picture.last or "0-0"
        block = () if block_ms is None else ("BLOCK", block_ms)
        reply = await self._scripts.redis.execute("XREAD", "COUNT", RECORDS, *block, "STREAMS", self._scripts.key("log"), after)
        entries: list[tuple[bytes, list[bytes]]] = reply[0][1] if reply else []
        for name, fields in entries:
            number = _number(name)
            if number != picture.position + 1:
                raise _Lost(f"records {picture.position + 1} to {number - 1} are gone")
            _apply(picture.table, fields[1])  # its one field, r
            picture.position, picture.last = number, name
        self._stats.records += len(entries)
        return len(entries)

    async def _load(self) -> _Picture:
        """A snapshot that is consistent once the log has been followed past its end.

        Records set or clear one (life, block) each, so reading a bucket that already shows some of them changes nothing in the end.
        A slot that did not live at the start is left out of the buckets: whatever it gets comes through the log. What a bucket shows is
        added to the picture, which is no newer: what was removed meanwhile is taken away by its record, still to come.
        """
        await self._listen()
        key = self._scripts.key
        (birth, logged, buckets, told), live, leases, now = await self._scripts.redis.transaction(
            [
                ("HMGET", key("meta"), "birth", "logged", "buckets", "told"),
                ("HGETALL", key("live")),
                ("GETRANGE", key("leases"), 0, MOST_LEASES),
                ("TIME",),
            ]
        )
        picture = _Picture(PrefixTable(), birth, int(logged or 0), told)
        for slot, record in _pairs(live).items():
            picture.table.join(slot, *_card(record, 8))
        picture.table.renew(leases or b"", _milliseconds(now), self._trusts)
        first, count = 0, int(buckets or 0)
        while first < count:  # buckets split meanwhile: what leaves one goes to a new one behind the last, and is read again there
            pages = _pages(first, count)
            while some := [*islice(pages, PAGES)]:
                left = iter(some)
                await asyncio.gather(*(self._load_pages(picture.table, left) for _ in range(READERS)))
                while await self._read(picture, None) == RECORDS:  # only now: older than a page's reply, a record may not come behind it
                    pass
            first, count = count, int(await self._scripts.redis.execute("HGET", key("meta"), "buckets") or 0)
        end = int(await self._scripts.redis.execute("HGET", key("meta"), "logged") or 0)
        while picture.position < end:
            if not await self._read(picture, None):
                raise _Lost(f"records after {picture.position} are gone")
        self._stats.snapshots += 1
        return picture

    async def _load_pages(self, table: PrefixTable, pages: Iterator[range]) -> None:
        redis, bucket, wide_of = self._scripts.redis, self._scripts.key("b"), self._scripts.key("w")
        for numbers in pages:
            buckets: list[list[bytes]] = await redis.pipeline([("HGETALL", bucket + number.to_bytes(3, "big")) for number in numbers])
            held: defaultdict[bytes, list[bytes]] = defaultdict(list)  # slot -> its blocks
            wide: list[tuple[bytes, bytes]] = []
            for entries in buckets:
                for name, record in zip(entries[::2], entries[1::2], strict=True):
                    end = 1 + 8 * (record[0] % WIDE)
                    blocks = name + record[1:end]
                    if record[0] >= WIDE:
                        wide.append((wide_of + name, blocks))
                        continue
                    for at in range(end, len(record), 3):
                        held[record[at : at + 2]].append(blocks[: 8 * record[at + 2]])
            if wide:
                found = await redis.execute("MGET", *(key for key, _ in wide))
                for (_, blocks), counts in zip(wide, found, strict=True):
                    for number, count in enumerate(counts or b""):
                        if count:
                            held[number.to_bytes(2, "big")].append(blocks[: 8 * count])
            for slot, parts in held.items():
                table.store(slot, hashes_from_bytes(b"".join(parts)))


def _number(record: bytes) -> int:
    """A record's number, of its id."""
    return int(record.partition(b"-")[0])


def _pages(first: int, count: int) -> Iterator[range]:
    """The buckets from `first` to `count`, some at a time."""
    return (range(at, min(at + BUCKETS, count)) for at in range(first, count, BUCKETS))


def _apply(table: PrefixTable, record: bytes) -> None:
    """One record of the log, as the scripts write it: its kind, a slot, and what the kind needs."""
    kind, slot = record[:1], record[1:3]
    if kind == b"J":
        table.join(slot, *_card(record, 3))
    elif kind == b"K":
        table.end(slot)
    elif kind == b"A":
        at = 3
        while at < len(record):
            change = table.store if record[at : at + 1] == b"S" else table.remove
            end = at + 5 + 8 * int.from_bytes(record[at + 1 : at + 5], "little")
            change(slot, hashes_from_bytes(record[at + 5 : end]))
            at = end
    else:
        raise ValueError(f"record of an unknown kind {kind!r} in the index's log")


def _card(record: bytes, at: int) -> tuple[str, int, str, float]:
    """Address, block tokens, incarnation and lease (ms), packed at `at` as the scripts' CARD."""
    lease_ms, epoch, block_tokens, length = struct.unpack_from("<d8sdH", record, at)
    return record[at + 26 : at + 26 + length].decode(errors="replace"), int(block_tokens), epoch.hex(), lease_ms


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _milliseconds(now: Any) -> float:
    seconds, microseconds = now
    return int(seconds) * 1000 + int(microseconds) / 1000
