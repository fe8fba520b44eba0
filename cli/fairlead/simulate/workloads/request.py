"""One request of a workload."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fairlead.bench.datasets import TRACE_BLOCK

BLOCK_TOKENS = TRACE_BLOCK


@dataclass(frozen=True, slots=True)
class Request:
    """`at` in seconds after the start; `blocks`: chained hashes of the prompt's blocks, the last one may be a part of a block."""

    at: float
    prompt_tokens: int
    output_tokens: int
    blocks: "array[int]"


def necessary_each(requests: Sequence[Request]) -> list[int]:
    """Return each request's prompt tokens that even one cache of unlimited size does not have."""
    seen: set[int] = set()
    tokens = []
    for request in requests:
        known = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        tokens.append(request.prompt_tokens - min(known * BLOCK_TOKENS, request.prompt_tokens - 1))
        seen.update(request.blocks)
    return tokens


def necessary_tokens(requests: Sequence[Request]) -> int:
    """Return the sum of `necessary_each`."""
    return sum(necessary_each(requests))


def rotate(requests: list[Request], share: float) -> list[Request]:
    """Return the same requests from a later moment on; the earlier ones follow at the end. Caches begin cold."""
    start = int(share * len(requests))
    if not start:
        return requests
    begin, span = requests[start].at, requests[-1].at - requests[0].at
    later = [replace(request, at=request.at - begin) for request in requests[start:]]
    return later + [replace(request, at=request.at - begin + span) for request in requests[:start]]
