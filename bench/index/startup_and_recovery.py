"""Costs of the index's users: the engine's call, the start of a mirror, and the time until answers are exact after a fault."""

import asyncio
import random
import statistics
import time
from array import array

import redis
import uvloop

from bench.index.redis_server import Numbers, percentile, resident
from bench.index.schema import BLOCK_TOKENS, NAMESPACE
from fairlead_index.changes import Changes
from fairlead_index.mirror.prefixes import MirrorReader
from fairlead_index.reader import IndexReader
from fairlead_index.worker_load import WorkerCard, WorkerLoad
from fairlead_index.writer import IndexWriter

CONVERGE = "bench/converge"
POD_BLOCKS = 100_000


def mirror(path: str, chain: "array[int]", expected: dict[str, int]) -> Numbers:
    """Return the seconds from a mirror's start to exact answers, the longest event-loop block, and the memory per block."""

    async def follow() -> Numbers:
        before, gaps, last = resident(), [0.0], time.perf_counter()

        async def heart() -> None:
            nonlocal last
            while True:
                await asyncio.sleep(0)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

        began = time.perf_counter()
        reader = MirrorReader(f"unix://{path}", NAMESPACE)
        reader.start()
        beating = asyncio.create_task(heart())
        await reader.wait_until_ready(600)
        seconds = time.perf_counter() - began
        beating.cancel()
        assert reader.match(chain) == expected, "the mirror is wrong"
        blocks = reader.stats.blocks
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            reader.match(chain)
            times.append(1e6 * (time.perf_counter() - begin))
        await reader.close()
        return {
            "start_s": seconds,
            "start_us_per_block": 1e6 * seconds / blocks,
            "loop_held_ms_p99": 1e3 * percentile([gap for gap in gaps if gap > 2e-4] or [0.0], 0.99),
            "loop_held_ms_max": 1e3 * max(gaps),
            "bytes_per_block": (resident() - before) / blocks,
            "p50_us": percentile(times, 0.5),
            "p99_us": percentile(times, 0.99),
        }

    return uvloop.run(follow())


def engine_call(repeats: int) -> Numbers:
    """Return the CPU nanoseconds per block in which the worker's event loop reports stored or removed blocks."""
    costs = {"stored_ns": [], "removed_ns": []}  # type: dict[str, list[float]]
    for seed in range(repeats):
        changes = Changes()
        changes.restart()
        draw = random.Random(seed)
        runs = [array("Q", draw.randbytes(8 * 16)) for _ in range(POD_BLOCKS // 16)]
        ends = [run[::-1] for run in runs]  # children first
        for name, call, chains in (("stored_ns", changes.store, runs), ("removed_ns", changes.remove, ends)):
            began = time.thread_time()
            for chain in chains:
                call(chain)
            costs[name].append(1e9 * (time.thread_time() - began) / POD_BLOCKS)
    return {name: statistics.median(each) for name, each in costs.items()}


def convergence(path: str, pods: int = 4) -> Numbers:
    """Return the seconds until matches are exact again, with 100,000 blocks per pod: after a recall, and after a flush of the index."""

    async def life() -> Numbers:
        url = f"unix://{path}"
        writers, chains = [], [array("Q", random.Random(pod).randbytes(8 * POD_BLOCKS)) for pod in range(pods)]
        for pod, chain in enumerate(chains):
            writers.append(IndexWriter(url, CONVERGE, WorkerCard(f"pod-{pod}", f"10.3.0.{pod}:8000", BLOCK_TOKENS)))
            writers[-1].store(chain)
            writers[-1].start()
        reader = IndexReader(url, CONVERGE, deadline=2.0)

        async def report() -> None:
            """Report as an idle engine does, once a second."""
            while True:
                for writer in writers:
                    writer.report(WorkerLoad())
                await asyncio.sleep(1.0)

        reporting = asyncio.create_task(report())

        async def exact(these: range) -> float:
            began = time.perf_counter()
            for pod in these:  # the last block is the last to be told
                truth = {f"10.3.0.{pod}:8000": POD_BLOCKS * BLOCK_TOKENS}
                while await reader.match(chains[pod]) != truth:  # noqa: ASYNC110  # what is measured is when Redis knows
                    await asyncio.sleep(0.005)
            return time.perf_counter() - began

        found = {"snapshot_all_s": await exact(range(pods))}
        await reader.recall("10.3.0.0:8000")
        found["recall_one_s"] = await exact(range(1))
        client = redis.Redis(unix_socket_path=path)
        client.flushall()
        found["flushed_all_s"] = await exact(range(pods))
        reporting.cancel()
        await asyncio.gather(*(writer.leave() for writer in writers))
        await reader.close()
        return found

    return uvloop.run(life())
