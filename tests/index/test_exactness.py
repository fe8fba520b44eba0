"""The index against the truth: random lives of several pods, and after every settling the match must be exact, for every prefix."""

import asyncio
import random

import pytest
from tests.index.conftest import eventually
from tests.redis_server import RedisServer

from fairlead_index.hashing import block_hashes
from fairlead_index.load import WorkerCard
from fairlead_index.reader import IndexReader
from fairlead_index.writer import IndexWriter

BLOCK = 4
PODS = 6


class World:
    """Pods with prefix-closed caches over a small tree of prompts, so that they share prefixes and evict leaves."""

    def __init__(self, seed: int, url: str, namespace: str) -> None:
        self.random = random.Random(seed)
        self.url, self.namespace = url, namespace
        self.prompts = [self._prompt() for _ in range(24)]
        self.writers: dict[str, IndexWriter] = {}
        self.truth: dict[str, dict[int, int]] = {}  # pod -> block -> parent

    def _prompt(self) -> list[int]:
        """A few shared beginnings, own endings, up to 40 blocks."""
        tokens: list[int] = []
        for level in range(self.random.randint(1, 4)):
            branch = self.random.randint(0, 2)
            tokens += [level * 10 + branch] * (BLOCK * self.random.choice([1, 3, 10]))
        return tokens

    def chain(self, prompt: list[int]) -> list[int]:
        return list(block_hashes(1, prompt, BLOCK))

    def boot(self, pod: str) -> None:
        self.writers[pod] = IndexWriter(self.url, self.namespace, WorkerCard(pod, f"{pod}:1", BLOCK), 2.0, buckets=16, call_seconds=2.0)
        self.writers[pod].start()
        self.truth[pod] = {}

    def store(self, pod: str) -> None:
        chain = self.chain(self.random.choice(self.prompts))
        chain = chain[: self.random.randint(1, len(chain))]
        self.writers[pod].stored(chain)
        for parent, value in zip([1, *chain], chain, strict=False):
            self.truth[pod][value] = parent

    def evict(self, pod: str) -> None:
        held, gone = self.truth[pod], []
        for _ in range(self.random.randint(1, 20)):
            leaves = [value for value in held if value not in set(held.values())]
            if leaves:
                gone.append(self.random.choice(leaves))
                del held[gone[-1]]
        self.writers[pod].removed(gone)

    async def die(self, pod: str) -> None:
        """Without a word; the next incarnation begins at once, with an empty cache."""
        task = self.writers[pod]._task
        assert task is not None
        self.writers[pod]._leaving.set()  # redis-py may swallow a cancellation while it connects: the loop ends then by this
        task.cancel()
        await asyncio.wait({task})
        await self.writers[pod]._scripts.close()
        self.boot(pod)

    async def leave(self, pod: str) -> None:
        await self.writers[pod].leave()
        del self.writers[pod], self.truth[pod]

    def expected(self, chain: list[int]) -> dict[str, int]:
        found = {}
        for pod, held in self.truth.items():
            depth = 0
            while depth < len(chain) and chain[depth] in held:
                depth += 1
            if depth:
                found[f"{pod}:1"] = depth * BLOCK
        return found

    async def settled(self) -> None:
        writers = self.writers.values()

        async def done() -> bool:
            return all(w.joined and w.stats.pending == 0 for w in writers)

        await eventually(done)


@pytest.mark.parametrize("seed", range(6))
async def test_match_is_exact_whatever_happens(server: RedisServer, namespace: str, seed: int) -> None:
    world = World(seed, server.url, namespace)
    reader = IndexReader(server.url, namespace, deadline=5.0)
    client = server.client()
    try:
        for n in range(PODS):
            world.boot(f"p{n}")
        for _ in range(12):
            for _ in range(world.random.randint(5, 30)):
                pod = f"p{world.random.randrange(PODS)}"
                if pod not in world.writers:
                    world.boot(pod)
                action = world.random.random()
                if action < 0.6:
                    world.store(pod)
                elif action < 0.92:
                    world.evict(pod)
                elif action < 0.96:
                    await world.die(pod)
                else:
                    await world.leave(pod)
                if world.random.random() < 0.2:
                    await asyncio.sleep(0)
            if world.random.random() < 0.2:  # this namespace is wiped, as FLUSHALL would
                keys = [key for key in client.keys("*") if namespace.encode() in key]
                if keys:
                    client.delete(*keys)

                async def converged() -> bool:
                    if {worker.pod for worker in await reader.workers()} != set(world.writers):
                        return False
                    return all([await reader.match(world.chain(p)) == world.expected(world.chain(p)) for p in world.prompts])

                await eventually(converged)
            await world.settled()
            await reader._call("sweep", world.random.randint(1, 200))
            for prompt in world.prompts:
                chain = world.chain(prompt)
                expected = world.expected(chain)
                assert await reader.match(chain) == expected
                route = await reader.route(chain, len(prompt))
                await reader.release(route.reservation)
                assert {c.address for c in route.candidates} == {f"{pod}:1" for pod in world.writers}
                for candidate in route.candidates:  # at most 8 levels for 6 pods: the route is exact as well
                    assert candidate.cached_tokens == min(expected.get(candidate.address, 0), len(prompt) - 1)
    finally:
        await asyncio.gather(*(writer.leave() for writer in world.writers.values()))
        await reader.close()
