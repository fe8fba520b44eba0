"""A modelled worker: it prefills prompts one after the other at a fixed rate. The queue and the cache are the engine's own code."""

import bisect
import sys
from array import array
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Literal

from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.worker_load import WorkerLoad
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import Lease, PrefixCache
from fairlead_worker.ipc.messages import CacheEvent, Sampling
from fairlead_worker.scheduler.config import PolicyName, SchedulerConfig
from fairlead_worker.scheduler.queue.waiting_queue import WaitingQueue
from fairlead_worker.scheduler.request import Request as EngineRequest

Engine = Literal["fairlead", "fcfs"]
"""`fairlead`: this project's engine. `fcfs`: vLLM and SGLang with their defaults: by arrival, and LRU eviction that ignores the queue."""
ORDER: PolicyName = "sjf"
"""Default of `--scheduling-policy`."""
PAGE = 2
"""Engine tokens per block of a prompt: the block's hash as two uint32. So the engine's page is one block, and sizes are in half blocks."""
NO_LIMIT = sys.maxsize
"""The engine bounds the work of a step, of some 50 ms. A modelled pod has one step per prompt."""
_SAMPLING = Sampling(max_tokens=1)


@dataclass(frozen=True, slots=True)
class PodModel:
    """`rate`: prompt tokens per second. `cache_blocks`: of 512 tokens. `token_seconds`: per output token. `report_seconds`: of loads."""

    rate: float = 8000.0
    cache_blocks: int = 1500
    token_seconds: float = 0.02
    step_seconds: float = 0.02
    report_seconds: float = 0.5


class FairleadQueue:
    """The engine's `WaitingQueue`: `ORDER`, protection of the prefixes that waiting requests use, and promises to the index."""

    def __init__(self, cache: PrefixCache, capacity: int) -> None:
        config = SchedulerConfig(
            max_model_len=PAGE * capacity,
            policy=ORDER,
            match_refresh_limit=NO_LIMIT,
            promise_limit=NO_LIMIT,
            promise_tokens=NO_LIMIT,
        )
        self._cache, self._queue = cache, WaitingQueue(config, cache)

    @property
    def tokens(self) -> int:
        """Uncached engine tokens of all waiting requests."""
        self._queue.refresh()
        return self._queue.tokens

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: EngineRequest) -> None:
        self._queue.add(request)
        self._queue.promise()

    def take(self) -> tuple[EngineRequest, Lease]:
        """Remove the next request. Return it with a lease on the cached pages of its prompt."""
        self._queue.refresh()
        with closing(self._queue.candidates()) as candidates:
            request = next(candidates)
        assert request.prefix_match is not None, "a waiting request has a match"
        lease = self._cache.attach(self._cache.match(request.prefix_match))
        self._queue.remove_admitted(request)
        return request, lease


class ArrivalQueue:
    """First come, first served. The cache does not know what waits."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._requests: deque[EngineRequest] = deque()
        self.tokens = 0
        """Engine tokens of all waiting requests, cached ones included: peers' routers do not ask for it."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: EngineRequest) -> None:
        self._requests.append(request)
        self.tokens += len(request.tokens)

    def take(self) -> tuple[EngineRequest, Lease]:
        request = self._requests.popleft()
        self.tokens -= len(request.tokens)
        match = self._cache.track(0, request.tokens)
        lease = self._cache.attach(self._cache.match(match))
        self._cache.untrack(match)
        return request, lease


@dataclass(slots=True)
class Prefill:
    """A prompt that is computed. `number`: its order of arrival at the pod. The last block of a prompt is always computed."""

    number: int
    cached: int
    computed: int
    ends_at: float


class Pod:
    """One worker: `add` and `finish` move it on in time, and `load_at` tells what it knew at a past moment."""

    def __init__(self, model: PodModel, phase: float, engine: Engine = "fairlead") -> None:
        self.model = model
        self.computed = 0
        """Prompt tokens computed so far."""
        self.cache = PrefixCache(
            PagePool(model.cache_blocks, PAGE), PAGE, lambda parent, block: int.from_bytes(block.tobytes(), sys.byteorder)
        )
        self._queue = FairleadQueue(self.cache, model.cache_blocks) if engine == "fairlead" else ArrivalQueue(self.cache)
        self._phase = phase  # workers report at different moments
        self._sizes: dict[int, int] = {}  # prompt tokens of the waiting requests, by number
        self._rounding = 0.0  # of their sizes in half blocks, in tokens
        self._numbers = count()
        self._running: tuple[EngineRequest, Lease, Prefill] | None = None
        self._times: list[float] = [-1.0]  # of each change: with the waiting requests, their uncached tokens, and the end of the prefill
        self._changes: list[tuple[int, float, float]] = [(0, 0.0, 0.0)]

    def add(self, request: Request, now: float) -> tuple[int, Prefill | None]:
        """Queue a request. Return its number, and the prefill that begins now if the pod was idle."""
        number = next(self._numbers)
        tokens = array("I", request.blocks[: self.model.cache_blocks].tobytes()) or array("I", bytes(4 * PAGE))
        self._sizes[number] = request.prompt_tokens
        self._rounding += request.prompt_tokens - len(tokens) * BLOCK_TOKENS / PAGE
        self._queue.add(EngineRequest("", tokens, len(tokens), _SAMPLING, 0, number))
        begun = None if self._running else self._begin(now)
        self._note(now)
        return number, begun

    def finish(self, now: float) -> Prefill | None:
        """End the running prefill: its prompt is cached. Return the next one."""
        assert self._running is not None, "an idle pod has nothing to finish"
        request, lease, _ = self._running
        self.cache.publish(lease, request.tokens, len(request.tokens))
        if request.promised is not None:
            self.cache.withdraw(request.promised, None)
        lease.release()
        self._running = None
        begun = self._begin(now) if len(self._queue) else None
        self._note(now)
        return begun

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Return what the index learns: the blocks stored, promised and removed since the last call."""
        return self.cache.drain_events()

    def load(self, now: float) -> tuple[float, WorkerLoad]:
        """Return the time of the worker's newest load report, and the report."""
        every = self.model.report_seconds
        at = now if every <= 0 else max(0.0, (now - self._phase) // every * every + self._phase)
        return at, self.load_at(at)

    def load_at(self, at: float) -> WorkerLoad:
        """Return the load at a past moment, without requests of that very moment."""
        waiting, tokens, ends_at = self._changes[bisect.bisect_left(self._times, at) - 1]
        backlog = tokens + max(0.0, ends_at - at) * self.model.rate
        return WorkerLoad(
            waiting=waiting, backlog_tokens=round(backlog), prefill_rate=self.model.rate, step_seconds=self.model.step_seconds
        )

    def _begin(self, now: float) -> Prefill:
        request, lease = self._queue.take()
        prompt = self._sizes.pop(request.arrival)
        self._rounding -= prompt - len(request.tokens) * BLOCK_TOKENS / PAGE
        cached = min(lease.shared * BLOCK_TOKENS, prompt - 1)
        self.cache.grow(lease, len(request.tokens))
        self.computed += prompt - cached
        prefill = Prefill(request.arrival, cached, prompt - cached, now + (prompt - cached) / self.model.rate)
        self._running = request, lease, prefill
        return prefill

    def _note(self, now: float) -> None:
        tokens = self._queue.tokens * BLOCK_TOKENS / PAGE + self._rounding
        self._times.append(now)
        self._changes.append((len(self._queue), max(0.0, tokens), self._running[2].ends_at if self._running else 0.0))
