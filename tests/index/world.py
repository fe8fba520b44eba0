"""Pods with prefix-closed caches over a small tree of prompts: real writers, and the truth about what each pod holds."""

import asyncio
import random
from collections import Counter

from fairlead_index.hashing import block_hashes
from fairlead_index.worker_load import WorkerCard
from fairlead_index.writer import IndexWriter

BLOCK = 4
ROOT = 1


class Cache:
    """What one incarnation of a pod holds: block -> parent, and the number of children of each."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}
        self._children: Counter[int] = Counter()

    def __contains__(self, block: int) -> bool:
        return block in self.parent

    def store(self, chain: list[int]) -> None:
        for parent, block in zip([ROOT, *chain], chain, strict=False):
            if block not in self.parent:
                self.parent[block] = parent
                self._children[parent] += 1

    def leaves(self) -> list[int]:
        return [block for block in self.parent if not self._children[block]]

    def drop(self, leaf: int) -> None:
        self._children[self.parent.pop(leaf)] -= 1


class World:
    """Pods that share prefixes and evict leaves. `url_of` returns where a pod finds Redis."""

    def __init__(self, seed: int, url: str, namespace: str, lease: float = 2.0, prompts: int = 24) -> None:
        self.random = random.Random(seed)
        self.url, self.namespace, self.lease = url, namespace, lease
        self.prompts = [self._prompt() for _ in range(prompts)]
        self._chains = {tuple(prompt): list(block_hashes(ROOT, prompt, BLOCK)) for prompt in self.prompts}
        self.writers: dict[str, IndexWriter] = {}
        self.truth: dict[str, Cache] = {}

    def _prompt(self) -> list[int]:
        """Return a prompt of up to 50 blocks: one of a few shared beginnings and its own ending."""
        tokens: list[int] = []
        for level in range(self.random.randint(1, 4)):
            branch = self.random.randint(0, 2)
            tokens += [level * 10 + branch] * (BLOCK * self.random.choice([1, 3, 10]))
        return tokens + [100 + self.random.randrange(1000)] * (BLOCK * self.random.randint(0, 10))

    def chain(self, prompt: list[int]) -> list[int]:
        return self._chains[tuple(prompt)]

    def url_of(self, pod: str) -> str:
        return self.url

    def boot(self, pod: str) -> None:
        card = WorkerCard(pod, f"{pod}:1", BLOCK)
        self.writers[pod] = IndexWriter(self.url_of(pod), self.namespace, card, self.lease, buckets=2, call_seconds=self.lease)
        self.writers[pod].start()
        self.truth[pod] = Cache()

    def store(self, pod: str) -> None:
        chain = self.chain(self.random.choice(self.prompts))
        chain = chain[: self.random.randint(1, len(chain))]
        self.writers[pod].store(chain)
        self.truth[pod].store(chain)

    def evict(self, pod: str) -> None:
        held, gone = self.truth[pod], []
        for _ in range(self.random.randint(1, 20)):
            leaves = held.leaves()
            if leaves:
                gone.append(self.random.choice(leaves))
                held.drop(gone[-1])
        self.writers[pod].remove(gone)

    async def crash(self, pod: str) -> None:
        """Kill the pod without telling the index."""
        writer = self.writers.pop(pod)
        del self.truth[pod]
        task = writer._task
        assert task is not None
        task.cancel()
        await asyncio.wait({task})
        await writer._scripts.close()

    async def die(self, pod: str) -> None:
        """Kill the pod without telling the index; the next incarnation starts immediately with an empty cache."""
        await self.crash(pod)
        self.boot(pod)

    async def leave(self, pod: str) -> None:
        writer = self.writers.pop(pod)
        del self.truth[pod]
        await writer.leave()

    def expected(self, chain: list[int]) -> dict[str, int]:
        found = {}
        for pod, held in self.truth.items():
            depth = 0
            while depth < len(chain) and chain[depth] in held:
                depth += 1
            if depth:
                found[f"{pod}:1"] = depth * BLOCK
        return found

    def settled(self) -> bool:
        """Return whether every writer believes that the index knows all that it holds."""
        return all(writer.joined and writer.stats.pending == 0 for writer in self.writers.values())

    async def close(self) -> None:
        await asyncio.gather(*(writer.leave() for writer in self.writers.values()))
