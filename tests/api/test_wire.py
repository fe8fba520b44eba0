"""The wire fuzzers on a small scale: byte streams that are nearly HTTP, and slow connections. `make fuzz-wire` is the large run."""

import asyncio
from typing import Any

import pytest
import uvloop
from tests.api.fleet import Pair
from tests.api.slow_connections import KINDS, MOST_GROWTH_KIB, TICKS, Crowd, resident_kib, watched
from tests.wire.fuzz import batch, over_sockets


def test_messages_end_where_h11_sees_their_end() -> None:
    """Request smuggling is a disagreement about message boundaries."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found, wrong = runner.run(batch(2500, 7))
    assert not wrong, wrong[0]
    assert min(found["router and h11"], found["worker and h11"]) > 1500


def test_streams_that_are_nearly_http_break_no_process_and_no_valid_client(pair: Pair) -> None:
    assert not asyncio.run(over_sockets(pair, 300, 7, quiet=True))


@pytest.mark.parametrize("side", ["router", "worker"])
def test_slow_connections_hold_little_memory_and_delay_no_other_client(pair: Pair, side: str) -> None:
    """Open some connections of each kind concurrently."""
    port, pid = (pair.router_port, pair.router.pid) if side == "router" else (pair.worker.port, pair.worker.process.pid)
    found: list[Any] = []
    with watched(port, pid, found):
        before = resident_kib(pid)
        crowds = [Crowd(port, kind, 40) for kind in KINDS]
        for tick in range(TICKS):
            for crowd in crowds:
                crowd.go_on(tick)
        most = resident_kib(pid)
    for crowd in crowds:
        crowd.close()
    failure, took, _ = found
    assert not failure and took and (most - before) / (40 * len(KINDS)) < MOST_GROWTH_KIB
