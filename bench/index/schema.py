"""Beside llm-d's documented Redis schema, in one server: bytes a placement, and a lookup of 2,048 blocks over 64 pods.

llm-d's schema (llm-d-kv-cache, pkg/kvcache/kvblock/redis.go): a hash for each block, `<hash as decimal>` -> JSON of the pod entry, and a
sorted set `engine:<hash>` from the engine's key to it; a lookup is one pipeline of HKEYS. Its Go and JSON costs are left out, to its
favour: both lookups are bytes made beforehand, sent over a unix socket, parsed by hiredis.
"""

import json
import os
import random
import time
from array import array
from collections.abc import Callable
from itertools import chain as joined
from typing import Any

import hiredis
import redis

from bench.index.redis_server import Numbers, Wire, commands, cpu_seconds, percentile
from fairlead_index.changes import Changes, pack
from fairlead_index.hashing import hash_bytes
from fairlead_index.reader import unpack_holder
from fairlead_index.redis.scripts import SCHEMA

NAMESPACE = "bench/index"
PREFIX = f"{SCHEMA}:{{{NAMESPACE}}}:"
BLOCK_TOKENS = 64
BATCH = 128


def depths(blocks: int, pods: int) -> list[int]:
    """Return how many of the prompt's blocks each pod holds: three hold more than a tenth, eight hold none, the others a tenth."""
    reach = [blocks // 2, 3 * blocks // 4, 9 * blocks // 10] + [blocks // 10] * (pods - 3)
    return reach + [0] * 8


def held(pod: int, chain: "array[int]", depth: int, blocks: int) -> list["array[int]"]:
    """Return the blocks of one pod: its part of the prompt, and other prompts of lognormal length (median 64 blocks)."""
    draw, chains, left = random.Random(pod), [chain[:depth]], blocks - depth
    while left > 0:
        length = min(left, max(1, int(draw.lognormvariate(4.16, 1.2))))
        chains.append(array("Q", draw.randbytes(8 * length)))
        left -= length
    return chains


def load_ours(client: redis.Redis, wire: Wire, sets: list[list["array[int]"]]) -> None:
    """Fill our index with `join` and `apply`, as a worker does."""
    scripts = dict(zip(("join", "apply"), commands(client, "join", "apply"), strict=True))

    def call(name: str, *args: bytes | str | int) -> bytes:
        return bytes(hiredis.pack_command((*scripts[name], 1, PREFIX, *args)))

    for pod, chains in enumerate(sets):
        epoch = os.urandom(8)
        slot: Any
        [[_, slot]] = wire.ask(  # type: ignore[misc]
            call("join", f"pod-{pod:04}", f"10.1.0.{pod}:8000", "revision-1", BLOCK_TOKENS, epoch, 10**8, 16), 1
        )
        changes, told = Changes(), 0
        changes.restart()
        for chain in chains:
            changes.store(chain)
        while changes.pending:
            part = [pack(changes.take(BATCH)) for _ in range(50)]
            wire.ask(b"".join(call("apply", slot, epoch, told + n, *batch) for n, batch in enumerate(part, 1)), len(part))
            told += len(part)


def load_peer(_: redis.Redis, wire: Wire, sets: list[list["array[int]"]]) -> None:
    for pod, chains in enumerate(sets):
        hashes = [*joined.from_iterable(chains)]
        entry = json.dumps(
            {"PodIdentifier": f"10.1.0.{pod}:8000", "DeviceTier": "gpu", "Speculative": False, "HasGroup": False, "GroupIdx": 0}
        )
        for at in range(0, len(hashes), 1000):
            part = hashes[at : at + 1000]
            request = b"".join(
                hiredis.pack_command(("HSET", str(value), entry, "")) + hiredis.pack_command(("ZADD", f"engine:{value ^ 1}", 0, str(value)))
                for value in part
            )
            wire.ask(request, 2 * len(part))


def memory(path: str, placements: int, peer_placements: int, pods: int, blocks: int) -> tuple[dict[str, Numbers], "array[int]"]:
    """Loads both schemas; `used_memory` of each placement, and blocks stored a second through one connection. Returns the prompt, too."""
    client, wire = redis.Redis(unix_socket_path=path), Wire(path)
    chain = array("Q", random.Random("prompt").randbytes(8 * blocks))
    reach = depths(blocks, pods)

    def used() -> int:
        return int(client.info("memory")["used_memory"])

    def load(loader: Callable[[redis.Redis, Wire, list[list["array[int]"]]], None], count: int) -> Numbers:
        sets = [held(pod, chain, depth, count // len(reach)) for pod, depth in enumerate(reach)]
        total = sum(len(chain) for chains in sets for chain in chains)
        before, began, spent = used(), time.perf_counter(), cpu_seconds(client)
        loader(client, wire, sets)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(client) - spent
        log = client.memory_usage(PREFIX + "log") or 0
        client.xtrim(PREFIX + "log", maxlen=0, approximate=False)  # bounded, whatever the placements are
        return {
            "placements": total,
            "bytes_per_placement": (used() - before) / total,
            "stored_per_s": total / seconds,
            "stored_per_server_cpu_s": total / cpu,
            "log_bytes": log,
        }

    return {"fairlead": load(load_ours, placements), "llm-d schema": load(load_peer, peer_placements)}, chain


def lookups(path: str, chain: "array[int]", pods: int, repeats: int) -> dict[str, Numbers]:
    """Look up the same prompt in both schemas in turns. Return the microseconds of the call and of the server's CPU."""
    client, wire = redis.Redis(unix_socket_path=path), Wire(path)
    reach = depths(len(chain), pods)
    [match] = commands(client, "match")
    ours = bytes(hiredis.pack_command((*match, 1, PREFIX, hash_bytes(chain))))
    [answer] = wire.ask(ours, 1)
    assert isinstance(answer, list)
    found = {address: tokens // BLOCK_TOKENS for address, tokens, _ in map(unpack_holder, answer)}
    assert found == {f"10.1.0.{pod}:8000": depth for pod, depth in enumerate(reach) if depth}, "the match is wrong"
    peer = b"".join(hiredis.pack_command(("HKEYS", str(value))) for value in chain)
    times: dict[str, list[float]] = {"fairlead": [], "llm-d schema": []}
    cpu: dict[str, list[float]] = {"fairlead": [], "llm-d schema": []}
    for _ in range(repeats):
        for name, request, replies, count in (("fairlead", ours, 1, 300), ("llm-d schema", peer, len(chain), 20)):
            spent = cpu_seconds(client)
            for _ in range(count):
                began = time.perf_counter()
                wire.ask(request, replies)
                times[name].append(1e6 * (time.perf_counter() - began))
            cpu[name].append(1e6 * (cpu_seconds(client) - spent) / count)
    return {
        name: {"p50_us": percentile(each, 0.5), "p99_us": percentile(each, 0.99), "server_cpu_us": min(cpu[name])}
        for name, each in times.items()
    }
