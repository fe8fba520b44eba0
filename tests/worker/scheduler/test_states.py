"""The workloads of vllm#45238 with recurrent layers: hits from few snapshots, and predictions that are kept where there is a snapshot."""

import random

from tests.worker.scheduler.engine_model import EngineModel

from fairlead_index.hashing import block_hashes

PAGE, BLOCK = 16, 64


class Served:
    """A worker that serves one prompt after another, and what the index says of each before."""

    def __init__(self, tokens: int, snapshots: int) -> None:
        self.machine = EngineModel(
            tokens // PAGE,
            PAGE,
            block_pages=BLOCK // PAGE,
            snapshots=snapshots,
            max_num_seqs=2,
            chunked_prefill_size=512,
            max_model_len=8192,
        )
        self.hits = self.over = 0

    def ask(self, prompt: list[int], max_tokens: int = 4) -> list[int]:
        machine = self.machine
        blocks = list(block_hashes(1, prompt, BLOCK))
        predicted = next((place for place, block in enumerate(blocks) if block not in machine.held), len(blocks)) * BLOCK
        name = machine.submit(prompt, max_tokens, ignore_eos=True)
        request = machine.scheduler._requests[name]
        while machine.told[name].finish is None:
            machine.step()
        machine.check()
        cached, hidden = machine.told[name].cached_tokens, request.history.first_hidden
        assert cached is not None and abs(cached - hidden - predicted) < BLOCK, "the router gets the number that it could predict"
        self.hits += cached >= BLOCK
        self.over += predicted - cached >= BLOCK
        return machine.told[name].tokens


def test_a_shared_system_prompt() -> None:
    """The first prompt has no snapshot where the second one leaves it, and the second one makes it."""
    chooser = random.Random(1)
    system = [chooser.randrange(30) for _ in range(1600)]
    served = Served(tokens=6000, snapshots=8)
    for _ in range(64):
        served.ask(system + [chooser.randrange(30) for _ in range(600)], max_tokens=2)
    assert served.hits == 62 and served.over == 1 and served.machine.scheduler.load().evicted_pages > 0


def test_growing_conversations() -> None:
    """Four conversations in turn, 64 turns, with two snapshots for each."""
    chooser = random.Random(2)
    served = Served(tokens=12_000, snapshots=8)
    texts = [[chooser.randrange(30) for _ in range(1200)] for _ in range(4)]
    for turn in range(64):
        texts[turn % 4] += [chooser.randrange(30) for _ in range(70)]
        texts[turn % 4] += served.ask(texts[turn % 4])
    assert served.hits == 60 and served.over == 0


def test_a_preempted_request_continues_from_its_latest_snapshot() -> None:
    machine = EngineModel(64, 4, block_pages=2, snapshots=4, max_num_seqs=1, chunked_prefill_size=8)
    machine.submit([1] * 50, max_tokens=20, ignore_eos=True, priority=5)
    for number in range(1, 3):
        for _ in range(5 * number):
            machine.step()
        machine.submit([2 + number] * 6, max_tokens=2, ignore_eos=True)
    machine.run()
    load = machine.scheduler.load()
    assert load.preemptions == 2 and load.preemption_recomputed_tokens < 2 * 8
    machine.check_answers()


def serve_conversations(method: str, turns: int = 6) -> int:
    """Return the cached tokens of four conversations that run at once."""
    machine = EngineModel(
        20_000 // PAGE,
        PAGE,
        block_pages=BLOCK // PAGE,
        snapshots=16,
        max_num_seqs=4,
        chunked_prefill_size=512,
        max_model_len=8192,
        speculative_method=method,
        speculative_break_even=10_000,
    )
    chooser = random.Random(3)
    texts = [[chooser.randrange(30) for _ in range(600)] for _ in range(4)]
    cached = 0
    for _ in range(turns):
        names = [machine.submit(text, 40, ignore_eos=True) for text in texts]
        machine.run()
        for text, name in zip(texts, names, strict=True):
            text += machine.told[name].tokens + [chooser.randrange(30) for _ in range(70)]
            cached += machine.told[name].cached_tokens or 0
    drafts = machine.scheduler.load().drafts
    assert method == "none" or (drafts is not None and drafts.tokens)
    return cached


def test_drafts_leave_slots_for_snapshots() -> None:
    """Each of the four could draft five tokens, which takes 20 slots of the 16 beside their own."""
    assert serve_conversations("draft") == serve_conversations("none") > 0
