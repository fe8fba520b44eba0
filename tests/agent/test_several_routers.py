"""Two routers in front of two engines: what one has sent, the other finds in the index before it is computed."""

import asyncio
from pathlib import Path

import pytest
from tests.agent.conftest import RunningAgent, eventually, pair
from tests.agent.kv.engine_pool import BLOCK
from tests.agent.stand_in_engine import FORMAT
from tests.router.harness import RunningRouter, running_router
from tests.servers.redis_server import RedisServer

from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.routing.prefix_aware import PrefixAware

TEXT = "A long text that is new to all workers. " * 14


async def prefers(router: RunningRouter, agent: RunningAgent) -> bool:
    """Return whether the router would send the text to this agent, because its engine holds or computes it."""
    policy, format = router.server.router.policy, agent.agent.format
    assert isinstance(policy, PrefixAware) and format is not None
    tokens = PromptEncoder(FORMAT).encode_text(TEXT)
    starts = (await policy.rank(RoutingRequest(len(tokens), block_hashes(prompt_root(format), tokens, BLOCK)))).starts
    return bool(starts) and starts[0].address == agent.agent.address and starts[0].cached >= len(tokens) - BLOCK


@pytest.mark.parametrize("mode", ["mirror", "remote"])
async def test_equal_prompts_through_two_routers_are_computed_once(tmp_path: Path, redis: RedisServer, namespace: str, mode: str) -> None:
    index = {"redis_url": redis.url, "index_namespace": namespace}
    async with pair(tmp_path / "a", pod_name="a", **index) as (engine, agent), pair(tmp_path / "b", pod_name="b", **index) as other:
        engines = {"a": engine, "b": other[0]}
        agents = {"a": agent, "b": other[1]}
        workers = ",".join(each.agent.address for each in agents.values())
        routing = {"workers": f"static://{workers}", "index_mode": mode} | index
        async with running_router(**routing) as first, running_router(**routing) as second:
            await first.usable(2)
            await second.usable(2)
            for each in engines.values():
                each.computes.clear()
            answers = [asyncio.create_task(first.complete(TEXT + "One?"))]
            await eventually(lambda: any(each.agent.in_flight for each in agents.values()))
            [chosen] = [name for name, each in agents.items() if each.agent.in_flight]
            await eventually(lambda: prefers(second, agents[chosen]))
            answers.append(asyncio.create_task(second.complete(TEXT + "Two?")))
            await eventually(lambda: sum(each.agent.in_flight for each in agents.values()) == 2)
            assert agents[chosen].agent.in_flight == 2, "nothing is computed yet, and both went to one engine"
            engines[chosen].computes.set()
            done = await asyncio.gather(*answers)
            assert [answer.headers["x-fairlead-pod"] for answer in done] == [chosen, chosen]
            cached = [int(answer.headers["x-fairlead-cached-tokens"]) for answer in done]
            assert max(cached) >= len(TEXT) - BLOCK, "both began at the same time: either one computed it"
            for each in engines.values():
                each.computes.set()
