"""Agents with contexts that grow: each turn sends the whole context again, with the result of a tool call added.

Sessions begin as a Poisson process, so the load rises until the first ones end. The parameters are this project's own. The
next turn does not wait for the answer (open loop).
"""

import random

from fairlead.simulate.workloads.arrivals import make_request, new_blocks
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request

SYSTEM_BLOCKS = 8
"""Instructions and tools, which all agents share."""
MOST_TURNS = 24
TURN_BLOCKS = (1, 6)
GAP_SECONDS = 4.0
"""Mean time between two turns."""


def agents(count: int, tokens_per_second: float, draw: random.Random) -> list[Request]:
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
            requests.append(make_request(at, context, draw))
            at += draw.expovariate(1 / GAP_SECONDS)
    return sorted(requests, key=lambda request: request.at)[:count]
