"""The workers for a prompt with the terms of their scores, without a choice: for people, and for requests that may be withdrawn."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from fairlead_index.groups import GroupedReader
from fairlead_index.hashing import hash_bytes
from fairlead_index.mirror.workers import to_scored
from fairlead_index.reader import IndexReader, IndexUnavailable
from fairlead_index.score import CONSIDERED, HOLDERS, SMALL_FLEET, StartEstimate, rank_candidates
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.routing.local_fallback import BLOCK_TOKENS, score_locally
from fairlead_router.routing.mirror_routing import MirrorRouting
from fairlead_router.routing.policies import RoutingRequest

Source = Literal["mirror", "remote", "local"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Workers, best first. `source`: where loads and cached prefixes are from; `local`: the workers' own reports, without the cache."""

    source: Source
    starts: list[StartEstimate]


async def rank(
    request: RoutingRequest, table: WorkerTable, mirror: MirrorRouting | None, reader: IndexReader | GroupedReader | None
) -> Ranking:
    """Return the workers that a choice compares now, by the score. Reserve nothing."""
    if mirror is not None and mirror.is_preferred and (starts := mirror.rank(request, (), CONSIDERED)):
        return Ranking("mirror", starts)
    if reader is not None:
        try:
            return Ranking("remote", await _rank_remotely(request, table, reader))
        except IndexUnavailable:
            pass
    if mirror is not None and (starts := mirror.rank(request, (), CONSIDERED)):
        return Ranking("mirror", starts)
    return Ranking("local", rank_locally(request, table.soonest(CONSIDERED, (), request.model)))


def rank_locally(request: RoutingRequest, workers: Iterable[Worker], now: float | None = None) -> list[StartEstimate]:
    """Return the workers by the loads that they report themselves, with no cached tokens."""
    return rank_candidates(
        [score_locally(worker, BLOCK_TOKENS, now) for worker in workers], b"", request.prompt_tokens, bytes(8), CONSIDERED
    )


async def _rank_remotely(request: RoutingRequest, table: WorkerTable, reader: IndexReader | GroupedReader) -> list[StartEstimate]:
    """Rank as `route.lua` does, which has no reply with terms; a test compares the two."""
    states = {state.address: state for state in await reader.workers()}
    matched = {address: tokens for chain in request.chains for address, tokens in (await reader.match(chain)).items()}
    eligible = table.eligible_addresses((), request.model)
    held = {address: tokens for address, tokens in matched.items() if address in eligible}
    homes = table.homes(request.hashes[0], 2, eligible) if request.hashes and not held else []
    soonest = [worker.address for worker in table.soonest(CONSIDERED, (), request.model)]
    deepest = sorted(held, key=lambda address: -held[address])[:HOLDERS]
    addresses = list(dict.fromkeys([*homes, *deepest, *soonest]))
    scored = []
    for worker in map(table.get, addresses if len(addresses) <= SMALL_FLEET else addresses[:CONSIDERED]):
        assert worker is not None  # nothing was awaited since it was listed
        state = states.get(worker.address)
        entry = to_scored(state) if state is not None else score_locally(worker, BLOCK_TOKENS)
        entry.depth = held.get(worker.address, 0) // entry.block_tokens
        scored.append(entry)
    return rank_candidates(scored, hash_bytes(request.hashes), request.prompt_tokens, os.urandom(8), CONSIDERED, homes)
