"""The router's half of the index: ask which worker starts a prompt soonest."""

import asyncio
import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from fairlead_index.access import RedisAccess
from fairlead_index.connection import REDIS_ERRORS, Scripts
from fairlead_index.errors import IndexUnavailable
from fairlead_index.hashing import hash_bytes
from fairlead_index.load import WorkerLoad
from fairlead_index.pause import Pause

__all__ = ["Candidate", "IndexReader", "IndexUnavailable", "Route", "WorkerState"]

MAX_CANDIDATES: Final = 8
Hashes = Sequence[int]  # fastest as the array("Q") that `block_hashes` returns


class Candidate(msgspec.Struct, frozen=True):
    """A worker for one prompt. `cached_tokens` of the prompt are expected in its cache; `expected_seconds` to its first token."""

    address: str
    pod: str
    cached_tokens: int
    expected_seconds: float
    fits: bool = True
    """Whether it has KV room for the tokens that are not cached."""


class Route(msgspec.Struct, frozen=True):
    """Candidates, best first (none when no worker is live or all are excluded). `reservation` holds the first one's time until released."""

    candidates: list[Candidate]
    reservation: bytes


class WorkerState(msgspec.Struct, frozen=True):
    """A live worker. `lease_seconds` are left of its lease; `reserved_tokens` were promised to it and are not in its load yet."""

    pod: str
    address: str
    block_tokens: int
    revision: str
    lease_seconds: float
    reserved_tokens: int
    load: WorkerLoad
    slot: int
    """This life of the pod: a restart is another."""
    load_age: float = 0.0
    """Seconds since the worker measured its load."""


class IndexReader:
    """Reads the index of one namespace. Every call ends within `deadline` seconds, with an answer or with IndexUnavailable.

    After a failure calls fail at once, without touching the network, until a growing pause is over; then one call tries again.
    Raises ValueError for a url or a namespace that can never work.
    """

    def __init__(self, redis: RedisAccess | str, namespace: str, deadline: float = 0.05) -> None:
        self._scripts = Scripts(redis, namespace, timeout=deadline)
        self._deadline = deadline
        self._pause = Pause()

    async def route(self, hashes: Hashes, prompt_tokens: int, exclude: Collection[str] = ()) -> Route:
        """Workers for a prompt, the one expected to give the first token soonest first, and that one's time reserved."""
        reply = await self._call("route", hash_bytes(hashes), prompt_tokens, os.urandom(8), MAX_CANDIDATES, *exclude)
        candidates = [
            Candidate(address.decode(), pod.decode(), int(cached), int(microseconds) / 1e6, bool(fits))
            for address, pod, cached, microseconds, fits in batched(reply[1:], 5)
        ]
        return Route(candidates, reply[0])

    async def match(self, hashes: Hashes) -> dict[str, int]:
        """Tokens of the prompt that each living worker holds, exactly; workers that hold none are left out."""
        reply = await self._call("match", hash_bytes(hashes))
        return {address.decode(): int(tokens) for address, tokens in batched(reply, 2)}

    async def release(self, reservation: bytes) -> None:
        """Gives a reservation back, at the first token or on failure. A reservation that is never released runs out by itself."""
        if reservation:
            await self._call("release", reservation)

    async def workers(self) -> list[WorkerState]:
        """Every living worker with its newest load."""
        return parse_workers(await self._call("workers"))

    async def recall(self, address: str) -> bool:
        """What the index says that a worker holds is wrong: its blocks count no longer, and it tells them anew.

        False, and nothing is done, while that was asked for too recently, or of nobody known.
        """
        return bool((await self._call("recall", address))[0] == b"OK")

    @property
    def away(self) -> bool:
        """Whether calls fail at once, for Redis has not answered for a while. One late answer is no such thing."""
        return self._pause.on

    async def close(self) -> None:
        """Closes the connections. Does not raise for a Redis that is away."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._scripts.close()

    async def _call(self, name: str, *args: bytes | str | int) -> list[Any]:
        if not self._pause.may_try():
            raise IndexUnavailable(f"redis is away: {self._pause.reason}")
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline):
                reply = await self._scripts.call(name, *args)
        except REDIS_ERRORS as error:
            reason = str(error) or f"no answer within {self._deadline * 1000:.0f} ms"
            late = time.monotonic() - began >= 0.9 * self._deadline
            (self._pause.missed if late else self._pause.failed)(reason)
            raise IndexUnavailable(f"redis is away: {reason}") from error
        self._pause.succeeded()
        return reply


def batched(flat: list[Any], size: int) -> Iterator[list[Any]]:
    return (flat[at : at + size] for at in range(0, len(flat), size))


def parse_workers(reply: list[Any]) -> list[WorkerState]:
    """What the script `workers` answers."""
    return [_worker(row) for row in batched(reply, 16)]


def _worker(row: list[bytes]) -> WorkerState:
    pod, address, block_tokens, revision, lease, owed, *load = row
    running, waiting, backlog, rate, step, free, total, page_size, age, slot = (float(value) for value in load)
    return WorkerState(
        pod=pod.decode(),
        address=address.decode(),
        block_tokens=int(float(block_tokens)),
        revision=revision.decode(),
        lease_seconds=float(lease),
        reserved_tokens=int(float(owed)),
        load=WorkerLoad(
            running=int(running),
            waiting=int(waiting),
            backlog_tokens=int(backlog),
            prefill_rate=rate,
            step_seconds=step,
            pages_free=int(free),
            pages_total=int(total),
            page_size=int(page_size),
        ),
        slot=int(slot),
        load_age=age,
    )
