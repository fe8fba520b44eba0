"""The wire format of SGLang: its own event classes, recorder and publisher, from its package, in front of the follower."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from bench.other_servers.environments import NotMade, make
from tests.agent.kv.engine_pool import BLOCK, Pool, Traffic, root_of
from tests.agent.kv.test_blocks import Index
from tests.agent.kv.test_follower import eventually

from fairlead_agent.kv.blocks import EngineBlocks
from fairlead_agent.kv.follower import Follower

CACHE = Path.home() / ".cache" / "fairlead" / "peers"


def as_sglang(events: list[dict[str, Any]], salts: dict[bytes, str]) -> list[dict[str, Any]]:
    """Return events with SGLang's names of blocks, 64 bits, and with the salt in each. `salts`: of known blocks."""
    found = []
    for event in events:
        named = event | {"block_hashes": [_number(name) for name in event["block_hashes"]]}
        if event["type"] == "BlockStored":
            above, extra = event["parent_block_hash"], event["extra_keys"][0] or []
            salt = salts[above] if above is not None else next((key for key in extra if key != event["lora_name"]), "")
            salts.update(dict.fromkeys(event["block_hashes"], salt))
            named |= {"parent_block_hash": None if above is None else _number(above), "salt": salt, "extra_keys": None}
        found.append(named)
    return found


def _number(name: bytes) -> int:
    return int.from_bytes(name[:8], "big", signed=True)


async def test_the_index_follows_sglang_s_own_publisher(tmp_path: Path) -> None:
    """With adapters, salts and evictions; the first half of the batches comes by replay."""
    try:
        environment = await asyncio.to_thread(make, "sglang-events", CACHE)
    except NotMade as error:
        pytest.skip(f"SGLang's package cannot be installed: {error}")
    endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    script = Path(__file__).with_name("sglang_publisher.py")
    engine = await asyncio.create_subprocess_exec(
        environment.python, script, endpoint, replay, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert engine.stdin is not None and engine.stdout is not None
    index, pool, salts = Index(), Pool(48), dict[bytes, str]()
    traffic, follower, following = Traffic(pool, 1), None, None
    try:
        for step in range(300):
            traffic.step()
            engine.stdin.write(json.dumps(as_sglang(pool.take_events(), salts)).encode() + b"\n")
            async with asyncio.timeout(60):
                assert await engine.stdout.readline() == b"%d\n" % step
            if step == 150:
                follower = Follower(endpoint, replay, EngineBlocks(BLOCK, root_of, index))
                following = asyncio.create_task(follower.run())
            if step > 150 and step % 30 == 0:
                await eventually(lambda: index.held == pool.usable)
        await eventually(lambda: index.held == pool.usable)
        assert follower is not None and follower.gaps == 0 and follower.replayed >= 100
        assert set(salts.values()) == {"", "a" * 32, "b" * 32}
    finally:
        if following is not None and follower is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            follower.close()
        engine.kill()
        await engine.wait()
