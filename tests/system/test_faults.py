"""Faults of real processes under steady load, as in docs/concepts/faults.md."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.servers.redis_server import RedisServer
from tests.system.node import Node, why_not
from tests.system.processes import Fleet
from tests.system.scenarios import NODES, REDIS, ROUTER_FLAGS, SCENARIOS, SLOW, Scenario, Times, one_after_another, play
from tests.system.slow_redis import SlowWay

TIMES = Times()
WITH_INDEX = (*SCENARIOS, one_after_another("redis killed, stopped, emptied", REDIS))
FLAGS = (*ROUTER_FLAGS, "--poll-interval", "0.2", "--silence-timeout", f"{TIMES.silence:g}")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def fleet(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), redis=redis.url, flags=FLAGS) as fleet:
        yield fleet


@pytest.mark.parametrize("scenario", WITH_INDEX, ids=lambda scenario: scenario.name)
def test_clients_see_no_error_while_one_worker_lives(scenario: Scenario, fleet: Fleet, redis: RedisServer) -> None:
    report, broken = asyncio.run(play(scenario, fleet, TIMES, redis=redis))
    assert not broken, (broken, report.row())


def test_a_slow_index_slows_no_answer(tmp_path: Path) -> None:
    with RedisServer() as redis, SlowWay(redis.port) as way:
        fleet = Fleet(tmp_path, workers=2, redis=f"redis://127.0.0.1:{way.port}/0", flags=FLAGS)
        with fleet:
            report, broken = asyncio.run(play(SLOW, fleet, TIMES, way=way))
    assert not broken, (broken, report.row())
    assert report.worst_first < 5


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_node_that_vanishes_breaks_only_its_own_streams(tmp_path: Path) -> None:
    """No FIN, no reset: its streams end within the silence timeout, and requests that had not begun are served elsewhere."""
    with Node(0) as dark, Node(1) as mute:
        fleet = Fleet(tmp_path, workers=1, routers=1, nodes=(dark, mute), policy="RoundRobin", flags=FLAGS)
        with fleet:
            report, broken = asyncio.run(play(NODES, fleet, TIMES, nodes=(dark, mute)))
    assert not broken, (broken, report.row())
