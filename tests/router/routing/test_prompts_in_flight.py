"""What a router knows of prompts that it has sent and whose answer has not begun."""

import random
from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_router.routing.prompts_in_flight import EXPIRY_SECONDS, PromptsInFlight

PROMPT = list(range(1000, 1010))
BLOCKS = {"a:1": 16, "b:1": 32}


def extend(sent: PromptsInFlight, held: Mapping[str, int], hashes: list[int], now: float = 0.0) -> dict[str, int]:
    return sent.extend(held, hashes, lambda address: BLOCKS.get(address, 16), now)


def test_a_sent_prompt_counts_until_its_answer_begins() -> None:
    sent = PromptsInFlight()
    sent.add(b"1", "a:1", PROMPT[:6], 0.0)
    sent.add(b"2", "b:1", PROMPT[2:5], 0.0)
    assert extend(sent, {"b:1": 64}, PROMPT) == {"a:1": 6 * 16, "b:1": 5 * 32}
    assert extend(sent, {"b:1": 64}, [*PROMPT[:3], 7, 8]) == {"a:1": 3 * 16, "b:1": 3 * 32}
    sent.remove(b"1")
    sent.remove(b"1")
    assert extend(sent, {"b:1": 64}, PROMPT) == {"b:1": 5 * 32}
    sent.remove(b"2")
    assert extend(sent, {}, PROMPT) == {} and not sent._requests


def test_a_part_whose_beginning_the_worker_lost_does_not_count() -> None:
    sent = PromptsInFlight()
    sent.add(b"1", "a:1", PROMPT[4:], 0.0)
    assert extend(sent, {"a:1": 4 * 16}, PROMPT) == {"a:1": 10 * 16}
    assert extend(sent, {"a:1": 3 * 16}, PROMPT) == {}


def test_a_prompt_that_nobody_releases_expires() -> None:
    sent = PromptsInFlight()
    sent.add(b"1", "a:1", PROMPT, 0.0)
    sent.add(b"2", "a:1", PROMPT[:2], 1.0)
    assert extend(sent, {}, PROMPT, EXPIRY_SECONDS - 0.1) == {"a:1": 10 * 16}
    assert extend(sent, {}, PROMPT, EXPIRY_SECONDS + 0.5) == {"a:1": 2 * 16}
    assert extend(sent, {}, PROMPT, EXPIRY_SECONDS + 1.5) == {} and not sent._requests


def test_a_request_without_a_reservation_is_not_kept() -> None:
    sent = PromptsInFlight()
    sent.add(b"", "a:1", PROMPT, 0.0)
    assert extend(sent, {}, PROMPT) == {}


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 1 << 30))
def test_the_depth_is_the_longest_prefix_in_flight(seed: int) -> None:
    """Compared with a plain search: prompts branch from each other, and workers hold any prefix of them."""
    draw = random.Random(seed)
    prompts = [[1]]
    while len(prompts) < 12:
        start = draw.choice(prompts)
        prompts.append([*start[: draw.randint(1, len(start))], *(draw.getrandbits(40) for _ in range(draw.randint(1, 6)))])
    sent, entries = PromptsInFlight(), {}
    for number in range(20):
        prompt, address = draw.choice(prompts), draw.choice(["a:1", "c:1"])
        entries[b"%d" % number] = address, prompt
        sent.add(b"%d" % number, address, prompt, 0.0)
    for name in draw.sample(sorted(entries), 8):
        sent.remove(name)
        del entries[name]
    for prompt in prompts:
        expected = {}
        for address in ("a:1", "c:1"):
            depths = [0]
            for where, other in entries.values():
                if where == address:
                    depths.append(
                        next((i for i, (x, y) in enumerate(zip(prompt, other, strict=False)) if x != y), min(len(prompt), len(other)))
                    )
            if max(depths):
                expected[address] = 16 * max(depths)
        assert extend(sent, {}, prompt) == expected
