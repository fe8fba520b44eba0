"""A Redis primary with a replica, and what can happen to them."""

import asyncio
import random
import struct
from pathlib import Path

from tests.index.link import Link
from tests.redis_server import RedisServer

LIVE_NUMBERS = {"lease": 0, "at": -72}  # where a record of `live` holds times: from its start, or from its end


class Pair:
    """`clients` lead to whoever is primary. Every fault that says so leaves a primary that answers."""

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
        """Waits until the replica follows."""
        async with asyncio.timeout(seconds):
            while self.replica.client().info("replication").get("master_link_status") != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def fall_behind(self) -> None:
        """What the primary does from now on, the replica does not get."""
        self._replication.hold()

    async def remember(self) -> None:
        """Writes the RDB that `restart` comes back with, behind the one that a replica may be getting just now."""
        client = self.primary.client()
        async with asyncio.timeout(20.0):
            while client.info("persistence").get("rdb_bgsave_in_progress"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        client.save()

    async def restart(self, *, old: bool) -> None:
        """kill -9, then back: empty, or from the RDB that was last written."""
        self.primary.kill()
        for link in self.clients:
            link.drop()
        await asyncio.sleep(self._draw.choice([0.0, 0.05, 0.3]))
        if not old:
            (Path(self.primary.directory) / "dump.rdb").unlink(missing_ok=True)
        self.primary.start()
        self._replication.heal()

    async def fail_over(self, prefix: str, skew_ms: float) -> None:
        """kill -9, and the replica, whose clock is `skew_ms` behind, is primary; a fresh replica follows it."""
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
    """The namespace as a server sees it whose clock is `by_ms` behind the one that wrote it: every time in it is that much later."""
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
        for member, score in client.zrange(prefix + "r:ready", 0, -1, withscores=True):
            pipe.zadd(prefix + "r:ready", {member: score + by_ms})
        if (reaped := client.hget(prefix + "meta", "reaped")) is not None:
            pipe.hset(prefix + "meta", "reaped", float(reaped) + by_ms)
        pipe.execute()
