"""Memory that long texts needed temporarily is released."""

import random
from concurrent.futures import ThreadPoolExecutor

from tests.api.fleet import Pair
from tests.worker.api.process import until

from fairlead_common.protocols.paths import COUNT_TOKENS

MOST_MIB = 110
"""MiB. A text needs some 90 while it is tokenized; four kept at once would be several times that."""


def test_a_worker_releases_the_memory_of_long_texts(pair: Pair) -> None:
    words = ["".join(random.Random(number).choices("abcdefghijklmnopqrstuvwxyz", k=2 + number % 9)) for number in range(2000)]

    def count(number: int) -> int:
        text = " ".join(random.Random(number).choices(words, k=80_000))
        return pair.worker.post(COUNT_TOKENS, messages=[{"role": "user", "content": text}]).json()["input_tokens"]

    before = pair.held()["worker MiB"]
    with ThreadPoolExecutor(4) as pool:
        assert min(pool.map(count, range(4))) > 200_000
    until(lambda: pair.held()["worker MiB"] <= before + MOST_MIB, f"back to {before} MiB, and not much more", seconds=20)
