"""Bursts of chat requests with very different lengths, as BurstGPT's generator makes them (arXiv 2401.17644).

The gaps have a Gamma distribution and the lengths a Zipf distribution, with the defaults of that generator (HPMLL/BurstGPT,
`example/src/burstgpt/config.py`: `gamma_shape` 0.5, `zipf_param` 1.1). Lengths are in blocks here. BurstGPT has no prefixes, so each prompt
gets one of a few system prompts.
"""

import random

from fairlead.simulate.workloads.arrivals import arrive, new_blocks, zipf_weights
from fairlead.simulate.workloads.request import Request

SHAPE = 0.5
"""Coefficient of variation 1.41; a Poisson process has 1."""
LENGTH_EXPONENT = 1.1
MOST_BLOCKS = 60
"""Longest prompt without its system prompt: 31k tokens."""
SYSTEM_PROMPTS, SYSTEM_BLOCKS = 16, 4


def bursts(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
    systems = [new_blocks(draw, SYSTEM_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    lengths = draw.choices(range(1, MOST_BLOCKS + 1), cum_weights=zipf_weights(MOST_BLOCKS, LENGTH_EXPONENT), k=count)
    prompts = [draw.choice(systems) + new_blocks(draw, length) for length in lengths]
    return arrive(prompts, [draw.gammavariate(SHAPE, 1 / SHAPE) for _ in prompts], tokens_per_second, draw)
