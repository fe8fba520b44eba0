"""Generated workloads: agents, bursts of chats, and questions about documents."""

import random
from array import array
from dataclasses import replace
from itertools import accumulate

from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request, necessary_tokens

OUTPUT_TOKENS = 200
"""Of every answer. It decides only how long a request counts as running."""

SYSTEM_BLOCKS = 8
"""Instructions and tools, which all agents share."""
MOST_TURNS = 24
TURN_BLOCKS = (1, 6)
GAP_SECONDS = 4.0
"""Mean time between two turns."""

BURST_SHAPE = 0.5
"""Coefficient of variation 1.41; a Poisson process has 1."""
LENGTH_EXPONENT = 1.1
MOST_BLOCKS = 60
"""Longest prompt without its system prompt: 31k tokens."""
SYSTEM_PROMPTS, SYSTEM_PROMPT_BLOCKS = 16, 4

DOCUMENTS = 400
DOCUMENT_EXPONENT = 0.99
"""YCSB's Zipf constant (Cooper et al., SoCC 2010)."""
DOCUMENT_BLOCKS = (8, 40)
"""4k to 20k tokens. On average all documents fill 9,600 blocks, which is 0.4 of the default fleet's caches."""
QUESTION_BLOCKS = (1, 3)


def agents(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
    """Return agents' requests with contexts that grow: each turn sends the whole context again, with the result of a tool call added.

    Sessions begin as a Poisson process, so the load rises until the first ones end. The parameters are this project's own. The
    next turn does not wait for the answer (open loop).
    """
    system = new_blocks(draw, SYSTEM_BLOCKS)
    sessions, turns = [], 0
    while turns < 1.5 * count:  # the requests after `count` are dropped, so that the load does not fall at the end
        context, contexts = system[:], []
        for _ in range(draw.randint(1, MOST_TURNS)):
            context += new_blocks(draw, draw.randint(*TURN_BLOCKS))
            contexts.append(context[:])
        sessions.append(contexts)
        turns += len(contexts)
    new_tokens = BLOCK_TOKENS * sum(len(contexts[-1]) - SYSTEM_BLOCKS for contexts in sessions) / len(sessions)
    requests, start = [], 0.0
    for contexts in sessions:
        start += draw.expovariate(tokens_per_second / new_tokens)
        at = start
        for context in contexts:
            requests.append(_make_request(at, context, draw))
            at += draw.expovariate(1 / GAP_SECONDS)
    return sorted(requests, key=lambda request: request.at)[:count]


def bursts(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
    """Return bursts of chat requests with very different lengths, as BurstGPT's generator makes them (arXiv 2401.17644).

    The gaps have a Gamma distribution and the lengths a Zipf distribution, with the defaults of that generator (HPMLL/BurstGPT,
    `example/src/burstgpt/config.py`: `gamma_shape` 0.5, `zipf_param` 1.1). Lengths are in blocks here. BurstGPT has no prefixes, so each
    prompt gets one of a few system prompts.
    """
    systems = [new_blocks(draw, SYSTEM_PROMPT_BLOCKS) for _ in range(SYSTEM_PROMPTS)]
    lengths = draw.choices(range(1, MOST_BLOCKS + 1), cum_weights=_zipf_weights(MOST_BLOCKS, LENGTH_EXPONENT), k=count)
    prompts = [draw.choice(systems) + new_blocks(draw, length) for length in lengths]
    return _arrive(prompts, [draw.gammavariate(BURST_SHAPE, 1 / BURST_SHAPE) for _ in prompts], tokens_per_second, draw)


def zipf_documents(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
    """Return questions about documents: some documents are asked about far more often than others. Arrivals are a Poisson process."""
    documents = [new_blocks(draw, draw.randint(*DOCUMENT_BLOCKS)) for _ in range(DOCUMENTS)]
    asked = draw.choices(documents, cum_weights=_zipf_weights(DOCUMENTS, DOCUMENT_EXPONENT), k=count)
    prompts = [document + new_blocks(draw, draw.randint(*QUESTION_BLOCKS)) for document in asked]
    return _arrive(prompts, [draw.expovariate(1) for _ in prompts], tokens_per_second, draw)


def new_blocks(draw: random.Random, count: int) -> "array[int]":
    return array("Q", (draw.getrandbits(64) for _ in range(count)))


def _zipf_weights(count: int, exponent: float) -> list[float]:
    """Return cumulative weights for `random.choices`: rank k has the weight `k ** -exponent`."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))


def _make_request(at: float, blocks: "array[int]", draw: random.Random) -> Request:
    """Return a request whose last block is full to a random part."""
    return Request(at, len(blocks) * BLOCK_TOKENS - draw.randrange(BLOCK_TOKENS), OUTPUT_TOKENS, blocks)


def _arrive(prompts: list["array[int]"], gaps: list[float], tokens_per_second: float, draw: random.Random) -> list[Request]:
    """Return the prompts as requests. The gaps are scaled, so that necessary tokens arrive at the given rate on average."""
    requests = [_make_request(at, blocks, draw) for at, blocks in zip(accumulate(gaps), prompts, strict=True)]
    scale = necessary_tokens(requests) / tokens_per_second / requests[-1].at
    return [replace(request, at=request.at * scale) for request in requests]
