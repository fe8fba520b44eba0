"""A real Redis Cluster for tests: three primaries on loopback, joined over the protocol in a second or two, without redis-cli."""

import time
from collections.abc import Callable
from types import TracebackType

import redis
from redis.crc import key_slot
from tests.servers.redis_server import RedisServer, free_port

SLOTS = 16384
OPTIONS = ("--cluster-enabled", "yes", "--cluster-node-timeout", "500", "--cluster-replica-validity-factor", "0")


class RedisCluster:
    """Primaries that share the slots evenly; `add_replica` and `move` change the cluster while it runs."""

    def __init__(self, version: str, primaries: int = 3) -> None:
        self.nodes = [RedisServer(version, options=OPTIONS, port=free_port()) for _ in range(primaries)]
        self._version = version

    @property
    def url(self) -> str:
        """The URL with all nodes, as a user would give it."""
        return "redis://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def __enter__(self) -> "RedisCluster":
        for node in self.nodes:
            node.start()
        share = -(-SLOTS // len(self.nodes))
        for at, node in enumerate(self.nodes):  # before any of them meets another: a node that knows others refuses an epoch
            node.command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
            node.command("CLUSTER", "ADDSLOTSRANGE" if self._version != "6.2" else "ADDSLOTS", *self._slots(at, share))
        for node in self.nodes[1:]:
            node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        self._until(lambda: all(b"cluster_state:ok" in node.command("CLUSTER", "INFO") for node in self.nodes))
        self._until(lambda: all(len(_nodes(node)) == len(self.nodes) for node in self.nodes))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for node in self.nodes:
            node.stop()

    def _slots(self, at: int, share: int) -> list[int]:
        first, last = at * share, min((at + 1) * share, SLOTS) - 1
        return [first, last] if self._version != "6.2" else list(range(first, last + 1))

    def owner(self, prefix: str) -> RedisServer:
        """Return the primary of the keys that begin with `prefix`."""
        slot = key_slot(prefix.encode())
        for row in self._alive().command("CLUSTER", "SLOTS"):
            if row[0] <= slot <= row[1]:
                return next(node for node in self.nodes if node.port == row[2][1])
        raise LookupError(slot)

    def add_replica(self, primary: RedisServer) -> RedisServer:
        replica = RedisServer(self._version, options=OPTIONS, port=free_port()).start()
        self.nodes.append(replica)
        replica.command("CLUSTER", "MEET", "127.0.0.1", primary.port)
        own = primary.command("CLUSTER", "MYID")
        self._until(lambda: own in _nodes(replica))
        replica.command("CLUSTER", "REPLICATE", own)
        self._until(lambda: b"master_link_status:up" in replica.command("INFO", "replication"))
        return replica

    def wait_for_failover(self, prefix: str, old: RedisServer) -> None:
        """Wait until another node serves the keys that `old` served."""
        self._until(lambda: self.owner(prefix) is not old, seconds=30)

    def move(self, prefix: str, target: RedisServer, meanwhile: Callable[[], None]) -> None:
        """Reshard as redis-cli does: open the slot, migrate its keys, call `meanwhile` half way, and assign the slot to `target`."""
        slot, source = key_slot(prefix.encode()), self.owner(prefix)
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.command("CLUSTER", "MYID"))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.command("CLUSTER", "MYID"))
        for half in range(2):
            count = source.command("CLUSTER", "COUNTKEYSINSLOT", slot)
            keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, count // 2 + 1 if not half else count)
            source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
            if not half:
                meanwhile()
        for node in (target, source, *self.nodes):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", target.command("CLUSTER", "MYID"))

    def _alive(self) -> RedisServer:
        return next(node for node in self.nodes if node.running)

    def _until(self, check: Callable[[], bool], seconds: float = 15) -> None:
        give_up = time.monotonic() + seconds
        while True:
            try:
                if check():
                    return
            except redis.RedisError:
                pass
            assert time.monotonic() < give_up, "the cluster did not settle"
            time.sleep(0.02)


def _nodes(node: RedisServer) -> list[bytes]:
    """Return the ids of the nodes that `node` is connected to, itself included."""
    rows = [line.split() for line in node.command("CLUSTER", "NODES").splitlines()]
    return [row[0] for row in rows if row[7] == b"connected"]
