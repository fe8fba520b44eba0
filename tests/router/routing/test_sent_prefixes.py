"""What a router knows of prefixes while Redis is away, beyond its mirror."""

import pytest

from fairlead_router.fleet.workers import Worker
from fairlead_router.routing import sent_prefixes
from fairlead_router.routing.sent_prefixes import SentPrefixes, expect_at_homes

BLOCK = 16
PROMPT = list(range(1000, 1010))


def make_worker(address: str, generation: int = 1) -> Worker:
    worker = Worker(address, lambda: 0.0)
    worker.generation = generation
    return worker


def test_a_sent_prompt_is_known_at_its_worker() -> None:
    sent, first, second = SentPrefixes(), make_worker("a:1"), make_worker("b:1")
    sent.add(first, BLOCK, PROMPT[:6])
    sent.add(second, BLOCK, PROMPT[:2])
    assert sent.add_to({"b:1": 4 * BLOCK, "c:1": BLOCK}, PROMPT) == {"a:1": 6 * BLOCK, "b:1": 4 * BLOCK, "c:1": BLOCK}
    sent.clear()
    assert sent.add_to({"c:1": BLOCK}, PROMPT) == {"c:1": BLOCK}


def test_a_worker_that_started_again_has_lost_what_was_sent() -> None:
    sent = SentPrefixes()
    sent.add(make_worker("a:1"), BLOCK, PROMPT)
    sent.add(make_worker("a:1", generation=2), BLOCK, PROMPT[:1])
    assert sent.add_to({}, PROMPT) == {"a:1": BLOCK}


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_prefixes, "MAX_BLOCKS", 15)
    sent, worker = SentPrefixes(), make_worker("a:1")
    sent.add(worker, BLOCK, PROMPT)
    sent.add(worker, BLOCK, range(10))
    assert sent.add_to({}, PROMPT) == {} and sent.add_to({}, range(10)) == {"a:1": 10 * BLOCK}


def test_homes_count_only_beyond_what_is_known() -> None:
    homes = {PROMPT[0]: make_worker("one:1"), PROMPT[3]: make_worker("four:1"), PROMPT[7]: make_worker("eight:1")}
    held = {"known:1": 4 * BLOCK}
    assert expect_at_homes(held, PROMPT, lambda worker: BLOCK, homes.get) == held | {"eight:1": 8 * BLOCK}
    assert expect_at_homes({}, PROMPT[:5], lambda worker: BLOCK, homes.get) == {"one:1": BLOCK, "four:1": 4 * BLOCK}
