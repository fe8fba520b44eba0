"""The Python score and route.lua give the same workers, in the same order, with the same times, in random states of a fleet."""

import os
import random
import struct
from dataclasses import replace

import pytest
import redis
from tests.index.conftest import either
from tests.index.runs import along
from tests.servers.redis_server import RedisServer

from fairlead_index.hash_ring import Ring
from fairlead_index.hashing import hash_bytes
from fairlead_index.reader import IndexReader, unpack_holder
from fairlead_index.redis.scripts import Scripts, script_source
from fairlead_index.score import ScoredWorker, rank_candidates

NOW = 10**13  # ms: a fixed clock for script and test
BLOCK = 16


@either
@pytest.mark.parametrize("seed", range(4))
async def test_the_python_score_equals_the_scripts(server: RedisServer, namespace: str, seed: int) -> None:
    draw = random.Random(seed)
    scripts = Scripts(server.url, namespace, timeout=5)
    client = server.client()
    route, match = (script_source(name).replace(" now_ms()\nlocal ", f" {NOW}\nlocal ") for name in ("route", "match"))
    assert str(NOW) in route and str(NOW) in match
    chain = [draw.getrandbits(64) for _ in range(24)]
    slots = {}
    ring = Ring(f"10.0.0.{n}:8000" for n in range(12))
    for n in range(12):
        address, epoch = f"10.0.0.{n}:8000", os.urandom(8)
        _, slots[address] = await scripts.call("join", f"p{n}", address, "r", BLOCK, epoch, 10**6, 16)
        depth = draw.choice([0, 0, 3, 9, 10, 24]) if seed else 0
        if depth:
            await scripts.call("apply", slots[address], epoch, 1, *along("S", chain[:depth]))
    for turn in range(150):
        hashes = hash_bytes([draw.getrandbits(64) for _ in range(4)] if turn % 3 == 0 else chain[: draw.choice([0, 5, 24])])
        prompt = max(1, len(hashes) // 8 * BLOCK + draw.randrange(BLOCK) + draw.choice([0, 0, 3000]))  # some are seconds of work
        depths = _depths(await scripts.redis.execute("EVAL", match, 1, scripts.prefix, hashes))
        workers = []
        queue = draw.choice([0, 0, 30_000])  # Every worker holds one: then the home's lateness is the prompt's own work.
        for address, slot in slots.items():
            worker = ScoredWorker(
                address=address,
                block_tokens=BLOCK,
                depth=depths.get(address, 0),
                reserved_tokens=draw.choice([0, 0, 100, 5000]),
                waiting=draw.choice([0.0, 0.0, 1.0, 7.0, 20_000.0]),
                backlog=queue + draw.choice([0, 0, 800, 20_000]),
                rate=draw.choice([0.0, 1000.0, 1000.0, 8000.0]),
                step=draw.choice([0.0, 0.0, 0.25]),
                load_age=draw.choice([0.0, 0.5, 4.0]),
                pages_free=draw.choice([0, 1, 100]),
                pages_total=draw.choice([0, 200]),
                page_size=16,
                arrivals=draw.choice([0.0, 0.0, 3.0, 40_000.0]),
            )
            workers.append(worker)
            _set(client, f"fl5:{{{namespace}}}:", slot, worker)
        request = os.urandom(8)
        reply = await scripts.redis.execute("EVAL", route, 1, scripts.prefix, hashes, prompt, request, 8, b"")
        rows = [(packed[27:].decode(), *struct.unpack_from("<qq?", packed)) for packed in reply[1:]]
        found = [(address, cached, fits, microseconds) for address, cached, microseconds, fits in rows]
        homes = ring.homes(int.from_bytes(hashes[:8], "little"), 2) if hashes else ()
        mine = rank_candidates(workers, hashes, prompt, request, 8, homes)
        assert [(start.address, start.cached, start.fits) for start in mine] == [each[:3] for each in found]
        assert [start.seconds for start in mine] == pytest.approx([microseconds / 1e6 for *_, microseconds in found], abs=2e-6)
    await scripts.close()


def _depths(reply: list[bytes]) -> dict[str, int]:
    return {address: tokens // BLOCK for address, tokens, _ in map(unpack_holder, reply)}


def _set(client: "redis.Redis", prefix: str, slot: bytes, worker: ScoredWorker) -> None:
    """Write the record of `live` that common.lua packs."""
    address, pod, revision = worker.address.encode(), b"pod", b"r"
    card = f"<dd8sdH{len(address)}sH{len(pod)}sH{len(revision)}s"
    record = struct.pack(card, NOW + 1000, 1000, bytes(8), BLOCK, len(address), address, 3, pod, 1, revision)
    load = (
        0,
        worker.waiting,
        worker.backlog,
        worker.rate,
        worker.step,
        worker.pages_free,
        worker.pages_total,
        worker.page_size,
        worker.arrivals,
    )
    record += struct.pack("<d9d", NOW - worker.load_age * 1000, *load)
    client.hset(prefix + "live", slot, record)
    client.setrange(prefix + "leases", 8 * int.from_bytes(slot, "big"), struct.pack("<d", NOW + 1000))
    client.hset(prefix + "r:owed", slot, worker.reserved_tokens)


@either
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e300])
async def test_a_forged_record_with_absurd_numbers_fails_no_call(server: RedisServer, namespace: str, number: float) -> None:
    """A worker may write any record of its service. The answer may rank it wrongly, but the others are still found."""
    scripts = Scripts(server.url, namespace, timeout=5)
    reader = IndexReader(server.url, namespace, deadline=5)
    hashes = range(1, 9)
    for address in ("a:1", "b:1"):
        epoch = os.urandom(8)
        _, slot = await scripts.call("join", address, address, "r", BLOCK, epoch, 10**6, 16)
        await scripts.call("apply", slot, epoch, 1, *along("S", list(hashes)))
    record = await scripts.redis.execute("HGET", scripts.key("live"), slot)
    load = struct.pack("<9d", *[number] * 9)
    for forged in (record[:24] + struct.pack("<d", number) + record[32:], record[: -len(load)] + load):
        await scripts.redis.execute("HSET", scripts.key("live"), slot, forged)
        route = await reader.route(hashes, 9 * BLOCK)
        assert "a:1" in {each.address for each in route.candidates}
        assert (await reader.match(hashes))["a:1"] == 8 * BLOCK
    await reader.close()
    await scripts.close()


@either
@pytest.mark.parametrize("forged", [0, 1])
async def test_a_worker_of_a_forged_rate_comes_last(server: RedisServer, namespace: str, forged: int) -> None:
    """Its work is infinite: without congestion the price must not become NaN, which compares as neither later nor sooner."""
    scripts = Scripts(server.url, namespace, timeout=5)
    workers = [ScoredWorker(f"{name}:1", BLOCK, rate=1e-320 if place == forged else 8000.0) for place, name in enumerate("ab")]
    for worker in workers:
        epoch = os.urandom(8)
        _, slot = await scripts.call("join", worker.address, worker.address, "r", BLOCK, epoch, 10**6, 16)
        await scripts.call("heartbeat", slot, epoch, 0, 0, 0, 0, 0, worker.rate, 0, 0, 0, 0, 0)
    reader = IndexReader(server.url, namespace, deadline=5)
    addresses = [each.address for each in (await reader.route((), 4000)).candidates]
    assert addresses == [workers[1 - forged].address, workers[forged].address]
    assert addresses == [start.address for start in rank_candidates(workers, b"", 4000, bytes(8), 2)]
    await reader.close()
    await scripts.close()


@pytest.mark.parametrize(("prompt", "page", "cached"), [(48, 16, 32), (49, 16, 48), (48, 0, 47), (48, 4, 44), (1, 16, 0)])
def test_the_predicted_tokens_are_what_a_worker_can_reuse(prompt: int, page: int, cached: int) -> None:
    """Whole pages and never the last token: otherwise the prediction for a prompt of whole blocks is always wrong."""
    worker = ScoredWorker(address="a:1", block_tokens=16, depth=3, page_size=page)
    [start] = rank_candidates([worker], bytes(24), prompt, bytes(8), 1)
    assert start.cached == cached


@pytest.mark.parametrize(
    ("backlogs", "waiting", "scores"),
    [
        ((2000, 0), 0, {"a": (0.28, 0.37), "b": (0.27, 0.41)}),
        ((8000, 0), 0, {"b": (0.27, 0.41), "a": (1.03, 1.12)}),
        ((24_000, 16_000), 10, {"a": (3.03, 3.22), "b": (2.27, 5.1)}),
    ],
)
def test_the_example_of_the_page(backlogs: tuple[int, int], waiting: int, scores: dict[str, tuple[float, float]]) -> None:
    """docs/design/prefix-index/score.md"""
    workers = [
        ScoredWorker(address, 64, depth=depth, waiting=waiting, backlog=backlog, rate=8000, step=0.02)
        for address, depth, backlog in zip("ab", (30, 0), backlogs, strict=True)
    ]
    ranked = rank_candidates(workers, bytes(8 * 31), 2000, bytes(8), 2)
    assert [(start.address, (round(start.seconds, 2), round(start.score, 2))) for start in ranked] == list(scores.items())


def test_a_miss_costs_the_requests_that_arrive_while_it_is_computed() -> None:
    """One worker holds the prompt behind 1.6 s of work. The other is idle and computes it in a second, while 8 requests arrive there."""
    holder = ScoredWorker("a:1", 16, depth=500, backlog=12_800, rate=8000.0)
    other = ScoredWorker("b:1", 16, rate=8000.0)
    assert rank_candidates([holder, other], bytes(8 * 500), 8000, bytes(8), 1)[0].address == "b:1"
    busy = replace(other, arrivals=8.0)
    best, second = rank_candidates([holder, busy], bytes(8 * 500), 8000, bytes(8), 2)
    assert best.address == "a:1" and second.terms()["price"] == pytest.approx(0.25 + 4.0)
