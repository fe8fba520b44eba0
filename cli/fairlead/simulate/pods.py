"""A modelled worker: it prefills prompts one after the other at a fixed rate and has a prefix-closed LRU cache."""

import bisect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from fairlead.simulate.trace import BLOCK_TOKENS, Request


@dataclass(frozen=True, slots=True)
class PodModel:
    """`rate`: prompt tokens per second. `cache_blocks`: of 512 tokens. `token_seconds`: per output token. `report_seconds`: of loads."""

    rate: float = 8000.0
    cache_blocks: int = 1500
    token_seconds: float = 0.02
    step_seconds: float = 0.02
    report_seconds: float = 0.5


class PrefixLRU:
    """Blocks by last use. A prompt's parents are used after its children, so the oldest block is always a leaf."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def depth(self, blocks: Sequence[int]) -> int:
        """Return how many of the prompt's first blocks are cached."""
        for at, block in enumerate(blocks):
            if block not in self._blocks:
                return at
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Cache a prompt. Return the added blocks, parents first, and the evicted ones, children first."""
        kept = blocks[: self._capacity]
        stored = [block for block in kept if block not in self._blocks]
        for block in reversed(kept):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        evicted = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return stored, evicted


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of a request: TTFT in seconds, cached and computed prompt tokens, the times of first and last token."""

    ttft: float
    cached: int
    computed: int
    first_token_at: float
    done_at: float
    stored: list[int]
    evicted: list[int]


class Pod:
    """One worker with one queue. Requests arrive in order of time, so the cache is known when each arrives."""

    def __init__(self, model: PodModel, phase: float) -> None:
        self.model = model
        self.cache = PrefixLRU(model.cache_blocks)
        self.busy_until = 0.0
        self.computed = 0
        self._phase = phase  # workers report at different moments
        self._times: list[float] = [-1.0]  # when the queue grew, and until when it has been busy since
        self._busy: list[float] = [0.0]

    def serve(self, request: Request) -> Served:
        """Queue a request at its arrival time."""
        cached = min(self.cache.depth(request.blocks) * BLOCK_TOKENS, request.prompt_tokens - 1)
        computed = request.prompt_tokens - cached
        start = max(request.at, self.busy_until)
        self.busy_until = start + computed / self.model.rate
        first = self.busy_until + self.model.step_seconds
        self._times.append(request.at)
        self._busy.append(self.busy_until)
        self.computed += computed
        stored, evicted = self.cache.use(request.blocks)
        done = first + request.output_tokens * self.model.token_seconds
        return Served(first - request.at, cached, computed, first, done, stored, evicted)

    def backlog(self, now: float) -> float:
        """Return the prompt tokens still to be computed."""
        return max(0.0, self.busy_until - now) * self.model.rate

    def load(self, now: float) -> tuple[float, float]:
        """Return the time and the backlog of the worker's newest load report."""
        every = self.model.report_seconds
        at = now if every <= 0 else max(0.0, (now - self._phase) // every * every + self._phase)
        return at, self.backlog_as_of(at)

    def backlog_as_of(self, at: float) -> float:
        """Return the prompt tokens still to be computed at a past moment, without requests of that very moment."""
        return max(0.0, self._busy[bisect.bisect_left(self._times, at) - 1] - at) * self.model.rate
