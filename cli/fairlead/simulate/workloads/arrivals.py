"""What the generators share: new blocks, Zipf draws, and arrival times for a given load."""

import random
from array import array
from dataclasses import replace
from itertools import accumulate

from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request, necessary_tokens

OUTPUT_TOKENS = 200
"""Of every answer. It decides only how long a request counts as running."""


def new_blocks(draw: random.Random, count: int) -> "array[int]":
    return array("Q", (draw.getrandbits(64) for _ in range(count)))


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return cumulative weights for `random.choices`: rank k has the weight `k ** -exponent`."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))


def make_request(at: float, blocks: "array[int]", draw: random.Random) -> Request:
    """Return a request whose last block is full to a random part."""
    return Request(at, len(blocks) * BLOCK_TOKENS - draw.randrange(BLOCK_TOKENS), OUTPUT_TOKENS, blocks)


def arrive(prompts: list["array[int]"], gaps: list[float], tokens_per_second: float, draw: random.Random) -> list[Request]:
    """Return the prompts as requests. The gaps are scaled, so that necessary tokens arrive at the given rate on average."""
    requests = [make_request(at, blocks, draw) for at, blocks in zip(accumulate(gaps), prompts, strict=True)]
    scale = necessary_tokens(requests) / tokens_per_second / requests[-1].at
    return [replace(request, at=request.at * scale) for request in requests]
