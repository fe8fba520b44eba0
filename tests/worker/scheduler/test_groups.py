"""The workloads of vllm#45238 on a cache by groups: hits where window pages were evicted, and no prediction that is not kept."""

import random

import pytest
from tests.worker.scheduler.engine_model import EngineModel

from fairlead_index.hashing import block_hashes
from fairlead_worker.cache.groups import CacheGroups

PAGE, BLOCK_PAGES = 16, 4
GROUPS = {"mixed": CacheGroups(1, 2, 256), "windowed": CacheGroups(0, 1, 256)}


class Served:
    """A worker that serves one prompt after another, and what the index says of each before."""

    def __init__(self, groups: CacheGroups, tokens: int, host_tokens: int = 0) -> None:
        self.machine = EngineModel(
            tokens // PAGE * groups.count,
            PAGE,
            host_slots=host_tokens // PAGE * groups.count,
            block_pages=BLOCK_PAGES,
            groups=groups,
            chunked_prefill_size=512,
            max_model_len=8192,
        )
        self.hits = self.hidden = 0

    def ask(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        machine = self.machine
        blocks = list(block_hashes(1, prompt, PAGE * BLOCK_PAGES))
        predicted = next((place for place, block in enumerate(blocks) if block not in machine.held), len(blocks)) * PAGE * BLOCK_PAGES
        name = machine.submit(prompt, max_tokens, ignore_eos=True)
        request = machine.scheduler._requests[name]
        while machine.told[name].finish is None:
            machine.step()
        machine.check()
        cached, hidden = machine.told[name].cached_tokens, request.history.first_hidden
        assert cached is not None and cached >= min(predicted, (len(prompt) - 1) // PAGE * PAGE), (
            "the router predicts no more than is reused"
        )
        assert abs(cached - hidden - predicted) < PAGE * BLOCK_PAGES, "the router gets the number that it could predict"
        self.hits += cached >= PAGE * BLOCK_PAGES
        self.hidden += hidden > 0
        return machine.told[name].tokens


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize(("shared", "unique"), [(1600, 600), (1500, 700)])
def test_a_shared_system_prompt(groups: CacheGroups, shared: int, unique: int) -> None:
    chooser = random.Random(1)
    system = [chooser.randrange(30) for _ in range(shared)]
    served = Served(groups, tokens=6000)
    for _ in range(64):
        served.ask(system + [chooser.randrange(30) for _ in range(unique)], max_tokens=2)
    assert served.hits == 63 and served.machine.scheduler.load().evicted_pages > 0


@pytest.mark.parametrize(("groups", "tokens"), [("mixed", 6000), ("windowed", 3000)])
def test_growing_conversations(groups: str, tokens: int) -> None:
    """Four conversations in turn, 64 turns. All layers in one page, they would take 4 * 2,400 tokens in the end."""
    chooser = random.Random(2)
    served = Served(GROUPS[groups], tokens)
    texts = [[chooser.randrange(30) for _ in range(1200)] for _ in range(4)]
    for turn in range(64):
        texts[turn % 4] += [chooser.randrange(30) for _ in range(70)]
        texts[turn % 4] += served.ask(texts[turn % 4])
    assert served.hits == 60 and served.hidden > 20


@pytest.mark.parametrize(("groups", "tokens"), [("mixed", 3000), ("windowed", 1000)])
def test_conversations_that_the_device_has_no_room_for_are_on_the_host(groups: str, tokens: int) -> None:
    """The same with less device, over a host tier for all texts: nothing is lost, and the index sees all of it."""
    chooser = random.Random(2)
    served = Served(GROUPS[groups], tokens, host_tokens=20_000)
    texts = [[chooser.randrange(30) for _ in range(1200)] for _ in range(4)]
    for turn in range(64):
        texts[turn % 4] += [chooser.randrange(30) for _ in range(70)]
        texts[turn % 4] += served.ask(texts[turn % 4])
    host = served.machine.scheduler.load().host
    assert served.hits == 60 and served.hidden == 0
    assert host is not None and host.loaded and host.dropped == 0
