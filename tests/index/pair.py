"""A Redis primary with a replica, and the faults that can happen to them."""

import asyncio
import random
import struct
from pathlib import Path

from tests.index.link import Link
from tests.servers.redis_server import RedisServer

LIVE_NUMBERS = {"lease": 0, "at": -80}  # where a record of `live` holds times: offsets from its start or its end


class Pair:
    """`clients` connect to the current primary. Every fault leaves a primary that answers, unless its docstring says otherwise."""

    def __init__(self, version: str, draw: random.Random) -> None:
        self._draw = draw
        self.primary, self.replica = RedisServer(version), RedisServer(version)
        self.clients: list[Link] = []
        self._replication = Link(0)

    async def start(self) -> None:
        self.primary.start()
        self.replica.start()
        self._replication.target = self.primary.port
        await self._replication.__aenter__()
        self._follow()

    async def stop(self) -> None:
        await self._replication.__aexit__(None, None, None)
        self.primary.stop()
        self.replica.stop()

    def _follow(self) -> None:
        self.replica.client().execute_command("REPLICAOF", "127.0.0.1", self._replication.port)

    async def synced(self, seconds: float = 20.0) -> None:
        """Wait until the replica follows."""
        async with asyncio.timeout(seconds):
            while self.replica.client().info("replication").get("master_link_status") != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def fall_behind(self) -> None:
        """Cut replication: the replica misses what the primary does from now on."""
        self._replication.hold()

    async def remember(self) -> None:
        """Write the RDB that `restart` loads, after one that a replica may be receiving."""
        client = self.primary.client()
        async with asyncio.timeout(20.0):
            while client.info("persistence").get("rdb_bgsave_in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        client.save()

    async def restart(self, *, old: bool) -> None:
        """kill -9, then restart: empty, or from the last written RDB."""
        self.primary.kill()
        for link in self.clients:
            link.drop()
        await asyncio.sleep(self._draw.choice([0.0, 0.05, 0.3]))
        if not old:
            (Path(self.primary.directory) / "dump.rdb").unlink(missing_ok=True)
        self.primary.start()
        self._replication.heal()

    async def fail_over(self, prefix: str, skew_ms: float) -> None:
        """Kill the primary and promote the replica, whose clock is `skew_ms` behind; a fresh replica follows it."""
        self.primary.kill()
        for link in self.clients:
            link.drop()
        client = self.replica.client()
        client.execute_command("REPLICAOF", "NO", "ONE")
        shift_clock(self.replica, prefix, skew_ms)
        self.primary, self.replica = self.replica, self.primary
        for link in self.clients:
            link.lead_to(self.primary.port)
        (Path(self.replica.directory) / "dump.rdb").unlink(missing_ok=True)
        self.replica.start()
        self._replication.lead_to(self.primary.port)
        self._replication.heal()
        self._follow()


def shift_clock(server: RedisServer, prefix: str, by_ms: float) -> None:
    """Shift every time in the namespace later by `by_ms`, as seen by a server whose clock is that much behind the writer's."""
    client = server.client()
    with client.pipeline(transaction=True) as pipe:
        leases = client.get(prefix + "leases") or b""
        ends = struct.unpack(f"<{len(leases) // 8}d", leases)
        moved = [end + by_ms if end > 0 else end - by_ms if end < 0 else end for end in ends]
        pipe.set(prefix + "leases", struct.pack(f"<{len(ends)}d", *moved))
        for slot, record in client.hgetall(prefix + "live").items():
            data = bytearray(record)
            for at in LIVE_NUMBERS.values():
                at %= len(data)
                [time] = struct.unpack_from("<d", data, at)
                if time:
                    struct.pack_into("<d", data, at, time + by_ms)
            pipe.hset(prefix + "live", slot, bytes(data))
            for member, score in client.zrange(prefix.encode() + b"r:" + slot, 0, -1, withscores=True):
                pipe.zadd(prefix.encode() + b"r:" + slot, {member: score + by_ms})
        if (reaped := client.hget(prefix + "meta", "reaped")) is not None:
            pipe.hset(prefix + "meta", "reaped", float(reaped) + by_ms)
        pipe.execute()
