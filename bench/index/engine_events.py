"""Time until the index equals an engine's cache, over 10,000 events with drops, replay, restarts and kill -9.

A model of vLLM's block pool publishes on real ZMQ sockets, a real Redis holds the index. After each round of faults nothing more is sent,
and the time counts until the index has exactly what the engine can reuse. The exit status is 1 if a round takes longer than 2 s.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.agent.kv.engine_pool import BLOCK, Pool, Traffic, root_of
from tests.agent.kv.publisher import Publisher as EnginePublisher
from tests.servers.redis_server import RedisServer

from bench.common.report import make_parser, write_report
from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.follower import Follower
from fairlead_agent.kv.publisher import Publisher
from fairlead_index.reader import IndexReader
from fairlead_index.redis.access import RedisAccess
from fairlead_index.worker_load import WorkerCard

MOST_SECONDS = 2.0
ADDRESS = "127.0.0.1:8000"
FAULTS = ("none", "drop", "delay", "drop at the end", "restart", "kill")


class Engine:
    """An engine's cache, its traffic and its publisher."""

    def __init__(self, folder: Path, blocks: int) -> None:
        self.endpoint, self.replay, self._blocks, self._runs = f"ipc://{folder}/events", f"ipc://{folder}/replay", blocks, 0
        self.events = 0
        self.start()

    def start(self) -> None:
        """Start a process with an empty cache."""
        self._runs += 1
        self.pool = Pool(self._blocks, self._runs)
        self.traffic = Traffic(self.pool, self._runs)
        self.publisher = EnginePublisher(self.endpoint, self.replay)
        self._replaying = asyncio.create_task(self.publisher.serve_replay())

    async def step(self, fault: str = "") -> None:
        self.traffic.step()
        events = self.pool.take_events()
        self.events += len(events)
        await self.publisher.publish(events, fault)

    async def kill(self) -> None:
        """End without a farewell."""
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self.publisher.kill()


async def run(options: Any) -> dict[str, Any]:
    """Run rounds of faults until `--events` were published. Return the figures."""
    draw = random.Random(options.seed)
    seconds: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    with RedisServer() as redis, tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(RedisAccess(redis.url), "bench/events", WorkerCard("pod", ADDRESS, BLOCK))
        publisher.start()
        reader = IndexReader(redis.url, "bench/events", deadline=10.0)
        engine = Engine(Path(folder), options.blocks)
        blocks = EngineBlocks(BLOCK, root_of, publisher)
        follower = Follower(engine.endpoint, engine.replay, "", blocks)
        following = asyncio.create_task(follower.run())
        try:
            while engine.events < options.events:
                fault = draw.choice(FAULTS)
                for step in range(options.steps):
                    is_lost = fault == "drop at the end" and step > options.steps - 10
                    is_faulty = fault in ("drop", "delay") and draw.random() < 0.2
                    await engine.step("drop" if is_lost else fault if is_faulty else "")
                if fault in ("restart", "kill"):
                    await engine.kill()
                    if fault == "kill":  # connections are refused, so the agent starts again
                        await stop(follower, following)
                        blocks.forget()
                        follower = Follower(engine.endpoint, engine.replay, "", blocks)
                        following = asyncio.create_task(follower.run())
                    engine.start()
                    for _ in range(draw.randrange(options.steps)):
                        await engine.step()
                seconds[fault].append(await settle(engine, reader))
        finally:
            await stop(follower, following)
            await engine.kill()
            await publisher.leave()
            await reader.close()
    return {
        "events": engine.events,
        "rounds": dict(Counter({fault: len(each) for fault, each in seconds.items()})),
        "longest_seconds": {fault: max(each, default=0.0) for fault, each in seconds.items()},
    }


async def stop(follower: Follower, following: "asyncio.Task[None]") -> None:
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    follower.close()


async def settle(engine: Engine, reader: IndexReader) -> float:
    """Return the seconds until the index has exactly what the engine can reuse. Each block is asked for by itself."""
    began = time.monotonic()
    wanted = engine.pool.usable
    async with asyncio.timeout(60):
        while await held(engine, reader) != wanted:  # noqa: ASYNC110  # the index has no event
            await asyncio.sleep(0.01)
    return time.monotonic() - began


async def held(engine: Engine, reader: IndexReader) -> set[int]:
    """Return which of the blocks that any run has computed the index has."""
    found = set()
    for block, chain in engine.pool.chains().items():
        if (await reader.match(chain)).get(ADDRESS, 0) == BLOCK * len(chain):
            found.add(block)
    return found


def main() -> None:
    parser = make_parser(__name__, __doc__)
    parser.add_argument("--events", type=int, default=10_000, help="events to publish")
    parser.add_argument("--steps", type=int, default=60, help="requests that start or end in a round")
    parser.add_argument("--blocks", type=int, default=48, help="KV blocks of the engine")
    parser.add_argument("--seed", type=int, default=1, help="seed of traffic and faults")
    options = parser.parse_args()
    results = asyncio.run(run(options))
    table = Table("fault", "rounds", "longest, s")
    for fault in FAULTS:
        table.add_row(fault, str(results["rounds"].get(fault, 0)), f"{results['longest_seconds'][fault]:.2f}")
    Console().print(table)
    print(f"{results['events']} events")
    write_report(__name__, options, results)
    sys.exit(0 if max(results["longest_seconds"].values()) <= MOST_SECONDS else 1)


if __name__ == "__main__":
    main()
