"""What a choice compares, and what the router remembers of it, with the index's loads in memory."""

from array import array
from collections.abc import Iterator
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fairlead_index.score import CONSIDERED, HOLDERS, ScoredWorker
from fairlead_index.worker_load import PRIOR_RATE, WorkerLoad
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.routing.chooser import ALONE_SECONDS, Chooser, Prefixes
from fairlead_router.routing.policies import RoutingRequest

BLOCK = 16
PROMPT = array("Q", range(1000, 1100))
REQUEST = RoutingRequest(BLOCK * len(PROMPT) + 1, PROMPT)


class Index:
    """The loads of a fleet as the index has them: worker n has n prompts of a second before it."""

    others_changed_at = float("-inf")

    def __init__(self, count: int) -> None:
        self.is_fresh = True
        self.workers = {
            f"w{n}:1": ScoredWorker(f"w{n}:1", BLOCK, WorkerLoad(backlog_tokens=1000 * n, prefill_rate=1000.0)) for n in range(count)
        }
        self.reserved: dict[bytes, tuple[str, float]] = {}

    @property
    def soonest(self) -> Iterator[str]:
        return iter(sorted(self.workers, key=lambda address: self.workers[address].ready_key(0.0)))

    def refresh(self, scored: ScoredWorker) -> None:
        scored.reserved_tokens = sum(tokens for address, tokens in self.reserved.values() if address == scored.address)

    def reserve(self, address: str, tokens: float) -> bytes:
        name = len(self.reserved).to_bytes(8, "big")
        self.reserved[name] = address, tokens
        return name if self.is_fresh else b""

    def release(self, reservation: bytes) -> bool:
        return self.reserved.pop(reservation, None) is not None


def make(count: int, **options: bool) -> tuple[Chooser, Index, WorkerTable]:
    index, table = Index(count), WorkerTable()
    table.set_addresses(list(index.workers))
    for worker in table:
        worker.ready = True
        worker.load = index.workers[worker.address].load
    return Chooser(table, index, **options), index, table


def test_a_large_fleet_is_scored_by_its_deepest_holders_and_its_soonest_workers() -> None:
    chooser, _, _ = make(60)
    held = {f"w{n}:1": BLOCK * n for n in range(20, 40)}
    names = {start.address for start in chooser.rank(REQUEST, Prefixes(held, "remote")).starts}
    assert names == {f"w{n}:1" for n in (*range(CONSIDERED - HOLDERS), *range(40 - HOLDERS, 40))}
    tried = [("w0:1", 0), ("w1:1", 0)]
    assert chooser.soonest(REQUEST, ())[:2] == ["w0:1", "w1:1"] and chooser.soonest(REQUEST, tried)[:2] == ["w2:1", "w3:1"]
    choice = chooser.choose(REQUEST, tried, Prefixes({}, "remote"))
    assert choice is not None and choice.worker.address == "w2:1"


def test_workers_without_room_do_not_displace_better_ones_of_a_large_fleet() -> None:
    chooser, index, _ = make(60)
    for scored in list(index.workers.values())[:25]:
        scored.load = replace(scored.load, pages_total=100, page_size=BLOCK, pages_free=1)
    assert chooser.rank(REQUEST, Prefixes({}, "remote")).starts[0].address == "w25:1"


def test_a_small_fleet_is_scored_whole_and_a_worker_that_the_index_lacks_by_its_own_load() -> None:
    chooser, index, _ = make(8)
    del index.workers["w0:1"]
    ranking = chooser.rank(REQUEST, Prefixes({"w7:1": BLOCK * 100}, "mirror"))
    assert ranking.source == "mirror" and len(ranking.starts) == 8 and ranking.starts[0].address == "w0:1"


@given(backlog=st.integers(0, 50_000), sent=st.integers(0, 50_000), age=st.integers(0, 9), rate=st.sampled_from([0.0, 500.0, 8000.0]))
def test_the_score_and_the_table_of_workers_expect_the_same(backlog: int, sent: int, age: int, rate: float) -> None:
    """Choices without an index, `LeastLoad`, service classes and the endpoint picker have one estimate of a worker."""
    table, now = WorkerTable(), 100.0
    table.set_addresses(["w0:1"])
    (worker,) = table
    worker.ready, worker.load_at = True, now - age
    worker.load = WorkerLoad(backlog_tokens=backlog, prefill_rate=rate, step_seconds=0.02)
    worker.begin_prompt(sent, now - 1)
    [start] = Chooser(table, None, clock=lambda: now).rank(REQUEST, Prefixes({}, "late")).starts
    assert start.seconds == worker.expected_ttft(now, REQUEST.prompt_tokens)
    ahead = max(backlog - rate * age, sent - rate, 0)
    assert start.seconds == pytest.approx((ahead + REQUEST.prompt_tokens) / (rate or PRIOR_RATE) + 0.02)


def test_a_choice_reserves_its_work_until_it_is_released() -> None:
    chooser, index, _ = make(2)
    choice = chooser.choose(REQUEST, (), Prefixes({"w0:1": BLOCK * 60}, "remote"))
    assert choice is not None and choice.reservation is not None and choice.predicted == choice.indexed == BLOCK * 60
    assert list(index.reserved.values()) == [("w0:1", BLOCK * 40 + 1)]
    chooser.release(choice.reservation)
    assert not index.reserved


@pytest.mark.parametrize("is_alone", [True, False])
def test_only_a_router_that_is_alone_counts_what_it_has_sent_and_the_index_will_show(is_alone: bool) -> None:
    """Several would gather a burst at one worker: each knows its own part of it."""
    chooser, index, _ = make(2)
    index.others_changed_at = monotonic() - (2 * ALONE_SECONDS if is_alone else 0.0)
    first = chooser.choose(REQUEST, (), Prefixes({}, "mirror"))
    assert first is not None and first.predicted == 0 and first.reservation
    second = chooser.choose(REQUEST, (), Prefixes({}, "mirror"))
    assert second is not None and bool(second.in_flight) == is_alone
    index.is_fresh = False
    chooser.choose(REQUEST, (), Prefixes({}, "local"))
    known = chooser.known(REQUEST, Prefixes({}, "local"))
    assert BLOCK * len(PROMPT) in known.values(), "without Redis what it has sent is all that it knows"
    assert chooser.known(REQUEST, Prefixes({}, "late")) == {}


def test_a_late_answer_of_redis_leaves_the_choice_to_the_loads() -> None:
    chooser, index, _ = make(3)
    choice = chooser.choose(REQUEST, (), Prefixes({}, "late"))
    assert choice is not None and choice.worker.address == "w0:1" and choice.is_outdated and list(index.reserved.values())
