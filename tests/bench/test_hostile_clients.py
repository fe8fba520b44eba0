"""The hostile-client benchmark sends what it says, and its figures are of the processes that it names."""

import multiprocessing
import os
import random
import time

import h11
import pytest
from bench.hostile.inputs import BODY, KEY, KINDS, Kind
from bench.hostile.search import draw, vary
from bench.router.hostile_clients import MIB, cpu_seconds, family, forget_peak, resident_mib


def test_there_are_kinds_of_each_target_with_names_of_their_own() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 15
    assert {kind.target for kind in KINDS} == {"router", "batch"}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_sends_whole_requests_of_its_tenant(kind: Kind) -> None:
    requests = kind.build(random.Random(1))
    assert requests == kind.build(random.Random(1)), "the same for one seed"
    assert requests or kind.name == "other programs", "the row for comparison sends nothing"
    for data in (*requests[:1], *requests[-1:]):
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
        connection.receive_data(data)
        head = connection.next_event()
        assert isinstance(head, h11.Request) and dict(head.headers)[b"authorization"] == f"Bearer {KEY}".encode()
        while isinstance(event := connection.next_event(), h11.Data):
            pass
        assert isinstance(event, h11.EndOfMessage)
        assert kind.target == "batch" or len(data) < BODY, "a router refuses larger ones unread"


def test_a_search_tries_what_its_seed_says_and_small_changes_of_it() -> None:
    recipes = [draw(random.Random(seed)) for seed in range(50)]
    assert recipes == [draw(random.Random(seed)) for seed in range(50)] and len(set(recipes)) > 40
    chance = random.Random(1)
    for recipe in recipes:
        assert recipe.build().startswith(f"POST {recipe.path} HTTP/1.1\r\n".encode())
        other = vary(recipe, chance)
        assert (other.shape, other.atom) == (recipe.shape, recipe.atom) or (other.path, other.place, other.size) == (
            recipe.path,
            recipe.place,
            recipe.size,
        )


def test_cpu_and_memory_of_children_count() -> None:
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    child = context.Process(target=_work, args=(ready, stop))
    own, before = os.getpid(), cpu_seconds(os.getpid())
    child.start()
    assert ready.wait(60)
    assert child.pid in family(own)
    forget_peak(child.pid)
    assert resident_mib(child.pid, "VmHWM") >= resident_mib(child.pid) - 1
    assert resident_mib(own) > resident_mib(child.pid) >= 64
    stop.set()
    child.join()
    assert cpu_seconds(own) - before >= 0.3, "also after its end"


def _work(ready: "multiprocessing.synchronize.Event", stop: "multiprocessing.synchronize.Event") -> None:
    held = bytearray(os.urandom(64)) * MIB
    ends = time.process_time() + 0.3
    while time.process_time() < ends:
        pass
    ready.set()
    stop.wait(60)
    assert held
