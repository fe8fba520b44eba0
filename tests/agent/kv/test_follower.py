"""The follower on real sockets: whatever is lost, the blocks soon equal the engine's."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.agent.kv.engine_pool import BLOCK, Pool, Traffic, root_of
from tests.agent.kv.publisher import Publisher
from tests.agent.kv.test_blocks import Index

from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.follower import Follower

LIMIT = 60.0
"""Seconds after which a test fails. The promise of 2 s is measured by `bench agent/kv_events`, because tests share a busy machine."""


class Engine:
    """An engine's cache and its publisher."""

    def __init__(self, folder: Path, *, with_replay: bool = True, kept: int = 10_000) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay" if with_replay else ""
        self._kept, self._seed = kept, 0
        self.start()

    def start(self) -> None:
        """Start a process with an empty cache."""
        self._seed += 1
        self.pool = Pool(48, self._seed)
        self.traffic = Traffic(self.pool, self._seed)
        self.publisher = Publisher(self.endpoint, self.replay, kept=self._kept)
        self._replaying = asyncio.create_task(self.publisher.serve_replay())

    async def step(self, fault: str = "") -> None:
        self.traffic.step()
        await self.publisher.publish(self.pool.take_events(), fault)

    async def kill(self) -> None:
        self._replaying.cancel()
        await asyncio.gather(self._replaying, return_exceptions=True)
        self.publisher.kill()


@asynccontextmanager
async def following(engine: Engine) -> AsyncIterator[tuple[Follower, Index]]:
    index = Index()
    follower = Follower(engine.endpoint, engine.replay, EngineBlocks(BLOCK, root_of, index))
    task = asyncio.create_task(follower.run())
    try:
        yield follower, index
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        follower.close()
        await engine.kill()


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not holds():  # noqa: ASYNC110  # the state that it asks has no event
            await asyncio.sleep(0.01)


async def test_blocks_that_were_stored_before_the_agent_came(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for _ in range(50):
        await engine.step()
    async with following(engine) as (follower, index):
        await eventually(lambda: index.held == engine.pool.usable)
        assert index.held
        assert follower.gaps == 0


@pytest.mark.parametrize("fault", ["drop", "delay"])
async def test_lost_and_late_batches_are_replayed(tmp_path: Path, fault: str) -> None:
    draw = random.Random(fault)
    engine = Engine(tmp_path)
    async with following(engine) as (follower, index):
        for step in range(400):
            await engine.step(fault if draw.random() < 0.2 else "")
            if step % 40 == 39:
                await eventually(lambda: index.held == engine.pool.usable)
        assert follower.gaps == follower.restarts == 0
        assert follower.replayed > 0


async def test_a_loss_at_the_end_of_the_stream_is_noticed(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with following(engine) as (_, index):
        for _ in range(10):
            await engine.step()
        await eventually(lambda: index.held == engine.pool.usable)
        for _ in range(10):
            await engine.step("drop")
        await eventually(lambda: index.held == engine.pool.usable)


async def test_a_restarted_engine_begins_with_an_empty_cache(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with following(engine) as (follower, index):
        for restart in range(4):
            for _ in range(30):
                await engine.step()
            await eventually(lambda: index.held == engine.pool.usable)
            await engine.kill()
            engine.start()
            for _ in range(5 * restart):  # the last ones have sent more batches than their predecessor
                await engine.step()
        await eventually(lambda: index.held == engine.pool.usable)
        assert follower.restarts >= 3


async def test_a_gap_beyond_the_replay_withdraws_everything(tmp_path: Path) -> None:
    engine = Engine(tmp_path, kept=5)
    async with following(engine) as (follower, index):
        for _ in range(30):
            await engine.step()
            await eventually(lambda: follower._next == engine.publisher.number)
        assert index.held == engine.pool.usable
        resets = index.resets
        for _ in range(20):
            await engine.step("drop")
        await engine.step()
        await eventually(lambda: follower.gaps == 1)
        assert index.resets > resets
        for _ in range(300):
            await engine.step()
            await eventually(lambda: follower._next == engine.publisher.number)
            assert index.held <= engine.pool.usable
        assert len(index.held) > len(engine.pool.usable) / 2, "the index got the blocks again when they were used"


async def test_without_replay_a_gap_withdraws_everything(tmp_path: Path) -> None:
    engine = Engine(tmp_path, with_replay=False)
    async with following(engine) as (follower, index):
        async with asyncio.timeout(LIMIT):  # a subscription takes a moment, and nothing repeats what was sent before it
            while not index.held:
                await engine.step()
                await asyncio.sleep(0.01)
        await eventually(lambda: follower._next == engine.publisher.number)
        for _ in range(20):
            await engine.step("drop")
        await engine.step()
        await engine.step()
        await eventually(lambda: follower._next == engine.publisher.number)
        assert follower.gaps >= 1
        assert index.held <= engine.pool.usable


async def test_an_unreadable_batch_withdraws_everything(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with following(engine) as (_, index):
        for _ in range(30):
            await engine.step()
        await eventually(lambda: index.held == engine.pool.usable)
        await engine.publisher._send(engine.publisher.number, b"\xc1")
        await eventually(lambda: not index.held)
