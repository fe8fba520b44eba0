"""One service's index over several hash tags, for more than one shard of a Cluster: each pod writes to one group, routers read all."""

import asyncio
import contextlib
import math
import os
import random
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from hashlib import blake2b, sha1
from typing import Any, Final, TypeVar

from fairlead_index.hashing import hash_bytes
from fairlead_index.reader import (
    DEADLINE_SECONDS,
    MAX_CANDIDATES,
    Candidate,
    Hashes,
    IndexReader,
    IndexUnavailable,
    Route,
    Trust,
    WorkerState,
)
from fairlead_index.redis.access import RedisAccess
from fairlead_index.score import SLACK

MAX_GROUPS: Final = 64
_Answer = TypeVar("_Answer")


def group_namespaces(namespace: str, groups: int) -> list[str]:
    """Return the namespaces of a service's index. One group is the plain namespace."""
    return [namespace] if groups == 1 else [f"{namespace}:g{group}" for group in range(groups)]


def namespace_of(namespace: str, pod: str, groups: int) -> str:
    """Return the namespace that a pod writes to: by a hash of its name, the same in every process, so that groups fill evenly."""
    digest = blake2b(pod.encode(), digest_size=8).digest()
    return group_namespaces(namespace, groups)[int.from_bytes(digest, "big") % groups]


def create_reader(
    redis: RedisAccess | str,
    namespace: str,
    groups: int = 1,
    trusts: Trust = lambda address, incarnation: True,
    deadline: float = DEADLINE_SECONDS,
) -> "IndexReader | GroupedReader":
    """Return the reader of a service with `groups` groups. `deadline` and `trusts` as in IndexReader."""
    readers = [IndexReader(redis, each, deadline, trusts) for each in group_namespaces(namespace, groups)]
    return readers[0] if groups == 1 else GroupedReader(readers)


class GroupedReader:
    """An IndexReader over all groups. It queries them in parallel, so a call takes one round trip.

    A group that does not reply in time is left out with its workers. If none replies, calls raise IndexUnavailable.
    """

    def __init__(self, readers: Sequence[IndexReader]) -> None:
        self._readers = readers
        self._releases: set[asyncio.Task[None]] = set()
        self._in_flight: Counter[bytes] = Counter()  # requests in flight, by the first block of their prompts

    async def route(self, hashes: Hashes, prompt_tokens: int, exclude: Collection[str] = ()) -> Route:
        """Route as IndexReader does. Each group reserves its best worker. The best is kept; the others are released in the background.

        Until then all of them count, so concurrent bursts never see less load than there is. A cancelled caller leaves reservations that
        expire.
        """
        packed = hash_bytes(hashes)
        first = packed[:8] or os.urandom(8)
        in_flight = self._in_flight[first]
        self._in_flight[first] += 1
        try:
            routes = await self._query_all([reader.route(hashes, prompt_tokens, exclude) for reader in self._readers])
        finally:
            self._in_flight[first] -= 1
            if not self._in_flight[first]:
                del self._in_flight[first]
        offers = {group: route for group, route in routes.items() if route.candidates}
        if not offers:
            return Route([], b"")
        chosen = _choose_group({group: route.candidates[0] for group, route in offers.items()}, packed, prompt_tokens, first, in_flight)
        for group, route in offers.items():
            if group != chosen:
                self._release_in_background(group, route.reservation)
        best, *rest = offers[chosen].candidates
        others = [*rest, *(each for group, route in offers.items() if group != chosen for each in route.candidates)]
        others.sort(key=lambda each: (not each.fits, each.expected_seconds))
        return Route([best, *others][:MAX_CANDIDATES], bytes([chosen]) + offers[chosen].reservation)

    async def match(self, hashes: Hashes) -> dict[str, int]:
        """Return exactly how many prompt tokens each live worker holds, by address. Workers that hold none are absent."""
        answers = await self._query_all([reader.match(hashes) for reader in self._readers])
        return {address: tokens for answer in answers.values() for address, tokens in answer.items()}

    async def release(self, reservation: bytes) -> None:
        """Release a reservation in the group that made it."""
        if reservation:
            await self._readers[reservation[0]].release(reservation[1:])

    async def recall(self, address: str) -> bool:
        """Recall a worker in the group that knows it."""
        return any((await self._query_all([reader.recall(address) for reader in self._readers])).values())

    @property
    def is_unavailable(self) -> bool:
        """Whether no group replies."""
        return all(reader.is_unavailable for reader in self._readers)

    async def workers(self) -> list[WorkerState]:
        """Return every live worker of all groups with its newest load."""
        answers = await self._query_all([reader.workers() for reader in self._readers])
        return [worker for answer in answers.values() for worker in answer]

    async def close(self) -> None:
        """Finish the releases and close the connections. Does not raise for an unreachable Redis."""
        await asyncio.gather(*self._releases, return_exceptions=True)
        await asyncio.gather(*(reader.close() for reader in self._readers))

    async def _query_all(self, calls: Sequence[Coroutine[Any, Any, _Answer]]) -> dict[int, _Answer]:
        """Return the replies by group, of the groups that replied."""
        answers: dict[int, _Answer] = {}
        failures: list[IndexUnavailable] = []
        for group, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(answer, IndexUnavailable):
                failures.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                answers[group] = answer
        if not answers:
            raise failures[0]
        return answers

    def _release_in_background(self, group: int, reservation: bytes) -> None:
        async def release() -> None:
            with contextlib.suppress(IndexUnavailable):  # it expires
                await self._readers[group].release(reservation)

        task = asyncio.create_task(release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)


def _choose_group(offers: dict[int, Candidate], packed: bytes, prompt_tokens: int, first: bytes, in_flight: int) -> int:
    """Return the group with the best offer by the rules of `route.lua`: soonest. Rendezvous decides between equals, and for
    a cold prefix between near ones.

    `in_flight`: requests of this process that start with the block `first`. All groups reserved for each of them, so all offers look equal
    again, and rendezvous alone would send a burst to one group.
    """
    blocks = len(packed) // 8
    # Depth of the deepest holder in blocks. Exact: a prompt of n blocks has tokens for n to n + 1 blocks.
    deepest = max(math.ceil(offer.cached_tokens * blocks / prompt_tokens) for offer in offers.values()) if blocks else 0
    at = 8 * min(deepest, blocks - 1)
    key = packed[at : at + 8] if blocks else first

    def order(group: int) -> tuple[bool, float]:
        return (not offers[group].fits, offers[group].expected_seconds)

    best = offers[min(offers, key=order)]
    slack = SLACK if not deepest else 1.0
    near = [group for group, offer in offers.items() if offer.fits == best.fits and offer.expected_seconds <= slack * best.expected_seconds]
    near.sort(key=lambda group: sha1(key + offers[group].address.encode(), usedforsecurity=False).digest())
    return random.choice(near) if in_flight else near[0]  # round robin would align with the pods' own order
