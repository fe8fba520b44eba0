"""A mirror of the index in a router's memory: it follows the change log, matches in microseconds, and works while Redis is unreachable."""

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
from fairlead_index.reader import MAX_TOKENS, IndexUnavailable, Trust
from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.backoff import Backoff, LogLimit
from fairlead_index.redis.connection import BadReply
from fairlead_index.redis.replies import as_byte_strings, checked
from fairlead_index.redis.scripts import REDIS_ERRORS, Scripts

__all__ = ["MirrorReader", "MirrorStats"]

REQUEST_LOG_SECONDS: Final = 30.0  # a tenth of LOGGED_SECONDS, for which Redis logs changes after a mirror's last request
LOGGED_SECONDS: Final = 300
CHECK_SECONDS: Final = 0.25  # the longest delay until an expired lease is noticed
BLOCK_MS: Final = 100
RECORDS: Final = 64  # per read: at most 1,300 blocks, a millisecond of the event loop; 8,500 during a worker's snapshot
BUCKETS: Final = 24  # per page of the snapshot: 2,304 blocks in full runs, about a millisecond of the event loop
PAGES: Final = 64  # pages of BUCKETS buckets between two reads of the log
READERS: Final = 2  # one page is decoded while the next is in flight
CALL_SECONDS: Final = 2.0
SLOT_BYTES: Final = 2
LAST_LEASE_BYTE: Final = 8 * 65536 - 1  # last byte of `leases` that a slot can use: a writer could make the value 512 MB long
WIDE: Final = 128  # as in common.lua

log = logging.getLogger(__name__)


@dataclass(slots=True)
class MirrorStats:
    """Counters for /metrics. `following` is false without Redis or while a snapshot loads: matches then use the last state."""

    following: bool = False
    records: int = 0
    snapshots: int = 0
    errors: int = 0
    blocks: int = 0
    workers: int = 0
    last_error: str = ""


class _Lost(Exception):
    """The log does not continue the mirrored state: records were trimmed, or Redis was replaced."""


@dataclass(slots=True)
class _State:
    """The table and its position in a log. `last`: id of the newest applied record, None before the first."""

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
        """`trusts`: which records count, evaluated at each check."""
        self._trusts = trusts
        self._scripts = Scripts(redis, namespace, timeout=call_seconds)
        self._state: _State | None = None
        self._lost = False  # the state cannot be continued: use it until a new one is loaded
        self._following = False
        self._closing = False
        self._stats = MirrorStats()
        self._log_limit = LogLimit()
        self._backoff = Backoff(first=0.05, longest=1.0)
        self._check_at = 0.0
        self._request_log_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the running event loop. Raises RuntimeError on a second call."""
        if self._task is not None:
            raise RuntimeError("the mirror was started before")
        self._task = asyncio.get_running_loop().create_task(self._run(), name="index-mirror")

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        """Return how many prompt tokens each live worker holds, by address. Workers that hold none are absent.

        Exact as of the last record read. While Redis is unreachable, workers that were live then count as live.
        Raises IndexUnavailable before the first state is loaded.
        """
        if self._state is None:
            raise IndexUnavailable(f"the index is not mirrored yet: {self._stats.last_error or 'loading'}")
        return self._state.table.match(hashes)

    def deepest(self, hashes: Sequence[int], limit: int, allowed: Container[str], included: Iterable[str] = ()) -> dict[str, int]:
        """Match about `limit` of the deepest workers in `allowed`, and those in `included`. The cost does not grow with the holders of
        a system prompt."""
        if self._state is None:
            raise IndexUnavailable(f"the index is not mirrored yet: {self._stats.last_error or 'loading'}")
        return self._state.table.deepest(hashes, limit, allowed, included)

    def check_soon(self) -> None:
        """Apply changed trust within BLOCK_MS."""
        self._check_at = 0.0

    def unique_shares(self) -> dict[str, float]:
        """Return, by address, the share of a live worker's blocks that no other live one holds; empty before the first state is loaded."""
        return self._state.table.unique_shares() if self._state is not None else {}

    @property
    def stats(self) -> MirrorStats:
        self._stats.following = self._following
        if self._state is not None:
            self._stats.blocks, self._stats.workers = len(self._state.table), self._state.table.num_incarnations
        return self._stats

    async def close(self) -> None:
        """Stop. Does not raise for an unreachable Redis."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    async def _run(self) -> None:
        while not self._closing:
            try:
                with checked("the index in Redis"):
                    await self._advance()
                self._backoff.reset()
            except (_Lost, BadReply) as lost:
                if self._log_limit.may_log():
                    log.warning("mirror reloads the index: %s", lost)
                await self._handle_failure(str(lost), lost=True)
            except REDIS_ERRORS as error:
                await self._handle_failure(str(error) or type(error).__name__, lost=False)
            except Exception as error:  # a bug here: the last state still serves matches
                log.exception("index mirror failed")
                await self._handle_failure(repr(error), lost=True)

    async def _advance(self) -> None:
        """Load a state where there is none, then follow the log for a moment."""
        if self._state is None or self._lost:
            self._state = await self._load()
            self._lost = False
        await self._run_once(self._state)

    async def _handle_failure(self, reason: str, *, lost: bool) -> None:
        self._following = False
        self._lost = self._lost or lost
        self._check_at = self._request_log_at = 0.0  # the next reply may come from another server
        self._stats.errors += 1
        self._stats.last_error = reason
        await asyncio.sleep(self._backoff.record_failure(reason))

    async def _run_once(self, state: _State) -> None:
        """Check log and leases when due, then apply new records, waiting up to BLOCK_MS for them."""
        if time.monotonic() >= self._check_at:
            await self._check(state)
            self._check_at = time.monotonic() + CHECK_SECONDS
        self._following = True
        await self._read(state, BLOCK_MS)
        state.table.sweep()

    async def _check(self, state: _State) -> None:
        """Check that the log continues the state, and update the leases. Raises _Lost."""
        key = self._scripts.key
        if time.monotonic() >= self._request_log_at:
            await self._request_log()
        last = state.last or b"-"
        (birth, logged, newest), leases, now, applied, following = await self._scripts.redis.transaction(
            [
                ("HMGET", key("meta"), "birth", "logged", "told"),
                ("GETRANGE", key("leases"), 0, LAST_LEASE_BYTE),
                ("TIME",),
                ("XRANGE", key("log"), last, last),
                ("XRANGE", key("log"), b"(" + last if state.last else last, "+", "COUNT", 1),
            ]
        )
        if birth != state.birth:
            raise _Lost("the namespace is new, or Redis was emptied")
        read_is_there = state.last is None or bool(applied)
        count = int(logged or 0)
        if newest != state.last and (not read_is_there or count < state.position):  # otherwise nothing is new, with or without a log
            raise _Lost(f"record {state.position}, which was applied, is missing")
        if count > state.position and (not following or _parse_number(following[0][0]) != state.position + 1):
            raise _Lost(f"record {state.position + 1} was not logged, or is gone")
        state.table.renew(leases or b"", _to_milliseconds(now), self._trusts)

    async def _request_log(self) -> None:
        """Make the scripts log changes for mirrors."""
        await self._scripts.redis.execute("SET", self._scripts.key("r:mirrored"), 1, "EX", LOGGED_SECONDS)
        self._request_log_at = time.monotonic() + REQUEST_LOG_SECONDS

    async def _read(self, state: _State, block_ms: int | None) -> int:
        """Apply the next records, in order and without a gap. Return their number."""
        after = state.last or "0-0"
        block = () if block_ms is None else ("BLOCK", block_ms)
        reply = await self._scripts.redis.execute("XREAD", "COUNT", RECORDS, *block, "STREAMS", self._scripts.key("log"), after)
        entries: list[tuple[bytes, list[bytes]]] = reply[0][1] if reply else []
        for name, fields in entries:
            number = _parse_number(name)
            if number != state.position + 1:
                raise _Lost(f"records {state.position + 1} to {number - 1} are gone")
            _apply(state.table, fields[1])  # its one field, r
            state.position, state.last = number, name
        self._stats.records += len(entries)
        return len(entries)

    async def _load(self) -> _State:
        """Load a snapshot. It is consistent once the log has been applied past its end.

        Each record sets or clears one (incarnation, block), so a bucket that already shows some records changes nothing in the end.
        Slots without a live incarnation at the start are skipped: their blocks come through the log. Blocks removed during the load are
        removed by their record, which is still to come.
        """
        await self._request_log()
        key = self._scripts.key
        (birth, logged, buckets, newest), live, leases, now = await self._scripts.redis.transaction(
            [
                ("HMGET", key("meta"), "birth", "logged", "buckets", "told"),
                ("HGETALL", key("live")),
                ("GETRANGE", key("leases"), 0, LAST_LEASE_BYTE),
                ("TIME",),
            ]
        )
        state = _State(PrefixTable(), birth, int(logged or 0), newest)
        for slot, record in _pairs(as_byte_strings(live, "the list of workers")).items():
            if len(slot) == SLOT_BYTES:  # a forged one
                state.table.join(slot, *_parse_card(record, 8))
        state.table.renew(leases or b"", _to_milliseconds(now), self._trusts)
        first, count = 0, int(buckets or 0)
        while first < count:  # buckets may split meanwhile: moved entries go to a new bucket after the last, which is read next
            pages = _split_pages(first, count)
            while batch := [*islice(pages, PAGES)]:
                remaining = iter(batch)
                await asyncio.gather(*(self._load_pages(state.table, remaining) for _ in range(READERS)))
                while await self._read(state, None) == RECORDS:  # only now: a record older than a page must not be applied after it
                    pass
            first, count = count, int(await self._scripts.redis.execute("HGET", key("meta"), "buckets") or 0)
        end = int(await self._scripts.redis.execute("HGET", key("meta"), "logged") or 0)
        while state.position < end:
            if not await self._read(state, None):
                raise _Lost(f"records after {state.position} are gone")
        self._stats.snapshots += 1
        return state

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


def _parse_number(record: bytes) -> int:
    """Return a record's number from its id."""
    return int(record.partition(b"-")[0])


def _split_pages(first: int, count: int) -> Iterator[range]:
    """Return the buckets from `first` to `count` in pages."""
    return (range(at, min(at + BUCKETS, count)) for at in range(first, count, BUCKETS))


def _apply(table: PrefixTable, record: bytes) -> None:
    """Apply one log record: its kind, a slot, and the kind's data."""
    kind, slot = record[:1], record[1:3]
    if kind == b"J":
        table.join(slot, *_parse_card(record, 3))
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


def _parse_card(record: bytes, at: int) -> tuple[str, int, str, float]:
    """Return address, block tokens, incarnation and lease (ms), packed at `at` as CARD in common.lua."""
    lease_ms, epoch, block_tokens, length = struct.unpack_from("<d8sdH", record, at)
    blocks = int(block_tokens) if 1 <= block_tokens < MAX_TOKENS else 1  # a forged record holds nothing worth a request
    return record[at + 26 : at + 26 + length].decode(errors="replace"), blocks, epoch.hex(), lease_ms


def _pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _to_milliseconds(now: Any) -> float:
    seconds, microseconds = now
    return int(seconds) * 1000 + int(microseconds) / 1000
