"""The index against the truth: random operations of several pods; whenever the index has settled, the match is exact for every prefix."""

import asyncio

import pytest
from tests.index.conftest import either, eventually
from tests.index.world import World
from tests.servers.redis_server import RedisServer

from fairlead_index.reader import IndexReader

PODS = 6


@either
@pytest.mark.parametrize("seed", range(2))
async def test_match_is_exact_after_any_operations(server: RedisServer, namespace: str, seed: int) -> None:
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
            if world.random.random() < 0.2:  # this namespace is wiped, as FLUSHALL would do
                keys = [key for key in client.keys("*") if namespace.encode() in key]
                if keys:
                    client.delete(*keys)

                async def converged() -> bool:
                    if {worker.pod for worker in await reader.workers()} != set(world.writers):
                        return False
                    return all([await reader.match(world.chain(p)) == world.expected(world.chain(p)) for p in world.prompts])

                await eventually(converged)

            async def settled() -> bool:
                return world.settled()

            await eventually(settled)
            await reader._scripts.call("sweep", world.random.randint(1, 200))
            for prompt in world.prompts:
                chain = world.chain(prompt)
                expected = world.expected(chain)
                assert await reader.match(chain) == expected
                assert await reader.deepest(chain, 12, b"", b"") == expected, "at most 8 levels for 6 pods, so it is exact as well"
    finally:
        await world.close()
        await reader.close()
