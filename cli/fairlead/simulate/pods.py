"""A modelled worker: steps with the chunk of one prompt and a token of each running request. Queue and cache are the engine's own code.

Between two events the steps are alike, so they count as a flow: the chunk per step gives the prefill's speed, and one token per step that
of each decode. Thus a replay costs a few events per request, however many steps there are.
"""

import bisect
import heapq
import math
import sys
from array import array
from dataclasses import dataclass
from itertools import count

from fairlead.simulate.queues import PAGE, Engine, create_queue
from fairlead.simulate.workloads.request import BLOCK_TOKENS, Request
from fairlead_index.arrival_rate import ArrivalRate
from fairlead_index.worker_load import WorkerLoad
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import Lease, PrefixCache
from fairlead_worker.ipc.messages import CacheEvent, Sampling, Submit
from fairlead_worker.scheduler.request import Request as EngineRequest
from fairlead_worker.scheduler.stats import KEEP

_SUBMIT = Submit("", b"", Sampling(max_tokens=1), 0)
_ALMOST = 1e-6
"""Tokens or steps that rounding may leave of a prompt or an answer that ends now."""


@dataclass(frozen=True, slots=True)
class PodModel:
    """A step takes `step_seconds`, the prefill of its chunk, and `context_seconds` for each token of context of its decodes.

    These are the terms of the engine's own model (`StepTime`), without the attention of prefill. The defaults are about a 70B model on
    four H100: 140 GB of weights and 320 KB of KV per token, read at 3.35 TB/s by each. `rate`: prompt tokens per second of full steps
    without decodes. `cache_blocks`: of 512 tokens. `report_seconds`: between load reports. `start_seconds`: of a new pod.
    """

    rate: float = 8000.0
    cache_blocks: int = 1500
    step_seconds: float = 0.01
    context_seconds: float = 2.4e-8
    chunk_tokens: int = 512
    max_running: int = 256
    report_seconds: float = 0.5
    start_seconds: float = 60.0

    def work_seconds(self, request: Request, computed: int) -> float:
        """Return what a request adds to the time of a pod that always has a prompt to compute. `computed`: its prompt tokens to compute."""
        context = request.prompt_tokens + request.output_tokens / 2
        return computed / self.rate + request.output_tokens * context * self.context_seconds


@dataclass(slots=True, eq=False)
class _Running:
    """A request with pages. `ends_at`: the pod's count of steps at its last token, once it decodes."""

    number: int
    request: EngineRequest
    lease: Lease
    prompt_tokens: int
    output_tokens: int
    cached: int
    left: float
    """Prompt tokens to compute."""
    ends_at: float = 0.0

    @property
    def context(self) -> float:
        """Mean tokens of context while it decodes."""
        return self.prompt_tokens + self.output_tokens / 2

    def __lt__(self, other: "_Running") -> bool:
        return (self.ends_at, self.number) < (other.ends_at, other.number)


@dataclass(frozen=True, slots=True)
class Progress:
    """What became of a request: `is_last`: its last token, else its first token. `cached`: prompt tokens."""

    number: int
    cached: int = 0
    is_last: bool = False


class Pod:
    """One worker: `add` and `advance` move it on in time, and `load_at` tells what it knew at a past moment."""

    def __init__(self, model: PodModel, phase: float, engine: Engine = "fairlead", started: float = 0.0) -> None:
        self.model = model
        self.computed = 0
        """Prompt tokens computed so far."""
        self.cache = PrefixCache(
            PagePool(model.cache_blocks, PAGE), PAGE, lambda parent, block: int.from_bytes(block.tobytes(), sys.byteorder)
        )
        self._queue = create_queue(engine, self.cache, model.cache_blocks)
        self._phase = phase  # workers report at different moments
        self._waiting: dict[int, tuple[Request, EngineRequest]] = {}
        self._rounding = 0.0  # of their sizes in half blocks, in tokens
        self._numbers = count()
        self._arrivals = ArrivalRate()
        self._now = started
        self._steps = 0.0  # steps so far: a decode gets one token in each
        self._context = 0.0  # tokens of context of all decodes
        self._recent_step = model.step_seconds  # mean of the recent steps with decodes, as the engine measures it
        self._prefill: _Running | None = None
        self._decodes: list[_Running] = []  # a heap by end
        self._times: list[float] = [started - 1.0]  # of each change, with the load from then on
        self._changes: list[tuple[int, int, float, float, float, float, int, float]] = [
            (0, 0, 0.0, 0.0, model.rate, model.step_seconds, model.cache_blocks, 0.0)
        ]

    def add(self, request: Request, now: float) -> int:
        """Queue a request, now. Return its number."""
        self._flow(now)
        number = next(self._numbers)
        self._arrivals.record(now)
        tokens = array("I", request.blocks[: self.model.cache_blocks].tobytes()) or array("I", bytes(4 * PAGE))
        engine_request = EngineRequest(_SUBMIT, tokens, len(tokens), number)
        self._waiting[number] = request, engine_request
        self._rounding += request.prompt_tokens - len(tokens) * BLOCK_TOKENS / PAGE
        self._queue.add(engine_request)
        self._begin()
        self._note()
        return number

    def next_event(self) -> float:
        """Return when the next request gets its first or its last token; infinity for an idle pod."""
        step, at = self._step_seconds, math.inf
        if self._prefill is not None:
            at = self._now + max(0.0, self._prefill.left) / self.model.chunk_tokens * step
        if self._decodes:
            at = min(at, self._now + max(0.0, self._decodes[0].ends_at - self._steps) * step)
        return at

    def advance(self, now: float) -> list[Progress]:
        """Move on to `now`, at most the next event. Return the requests that got their first or last token."""
        self._flow(now)
        ended: list[Progress] = []
        while self._decodes and self._decodes[0].ends_at <= self._steps + _ALMOST:
            done = heapq.heappop(self._decodes)
            self._context = self._context - done.context if self._decodes else 0.0
            done.lease.release()
            ended.append(Progress(done.number, done.cached, is_last=True))
        if self._prefill is not None and self._prefill.left <= _ALMOST * self.model.chunk_tokens:
            ended.append(self._end_prefill(self._prefill))
        self._begin()
        self._note()
        return ended

    @property
    def is_idle(self) -> bool:
        return self._prefill is None and not self._decodes and not self._queue

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
        place = max(0, bisect.bisect_left(self._times, at) - 1)
        waiting, running, tokens, left, rate, step, free, arrivals = self._changes[place]
        backlog = tokens + max(0.0, left - (at - self._times[place]) * rate)
        return WorkerLoad(
            running=running,
            waiting=waiting,
            backlog_tokens=round(backlog),
            prefill_rate=rate,
            step_seconds=step,
            pages_free=free,
            pages_total=self.model.cache_blocks,
            page_size=BLOCK_TOKENS,
            arrival_rate=arrivals,
        )

    # Internals

    @property
    def _step_seconds(self) -> float:
        """Seconds of a step now."""
        model = self.model
        own = model.step_seconds if self._prefill is None else model.chunk_tokens / model.rate
        return own + self._context * model.context_seconds

    def _flow(self, now: float) -> None:
        """Compute the steps up to `now`."""
        step = self._step_seconds
        steps = max(0.0, now - self._now) / step
        self._now = max(now, self._now)
        if self._decodes:
            self._recent_step = step + (self._recent_step - step) * KEEP**steps
        self._steps += steps
        if self._prefill is not None:
            self._prefill.left -= steps * self.model.chunk_tokens

    def _begin(self) -> None:
        """Start the next prompt, if none is computed and it gets a place and pages."""
        if self._prefill is not None or not self._queue or len(self._decodes) >= self.model.max_running:
            return
        taken = self._queue.take(self._pages_of)
        if taken is None:
            return
        engine_request, lease = taken
        request = self._leave_queue(engine_request)
        cached = min(lease.shared * BLOCK_TOKENS, request.prompt_tokens - 1)
        self.cache.grow(lease, PAGE * self._pages(engine_request, request))
        fresh = request.prompt_tokens - cached
        self.computed += fresh
        number = engine_request.arrival
        self._prefill = _Running(number, engine_request, lease, request.prompt_tokens, request.output_tokens, cached, fresh)

    def _end_prefill(self, done: _Running) -> Progress:
        """Cache the prompt. The request decodes from now on; its first token comes with this step."""
        self.cache.publish(done.lease, done.request.tokens, len(done.request.tokens))
        if done.request.promised is not None:
            self.cache.withdraw(done.request.promised, None)
        self._prefill = None
        done.ends_at = self._steps + max(0, done.output_tokens - 1)
        heapq.heappush(self._decodes, done)
        self._context += done.context
        return Progress(done.number, done.cached)

    def _leave_queue(self, engine_request: EngineRequest) -> Request:
        request, _ = self._waiting.pop(engine_request.arrival)
        self._rounding -= request.prompt_tokens - len(engine_request.tokens) * BLOCK_TOKENS / PAGE
        return request

    def _pages_of(self, engine_request: EngineRequest) -> int:
        return self._pages(engine_request, self._waiting[engine_request.arrival][0])

    def _pages(self, engine_request: EngineRequest, request: Request) -> int:
        """Return the pages of prompt and answer. A request that is longer than the cache gets all of it."""
        whole = -(-(request.prompt_tokens + request.output_tokens) // BLOCK_TOKENS)
        return min(self.model.cache_blocks, max(whole, len(engine_request.tokens) // PAGE))

    def _note(self) -> None:
        tokens = self._queue.tokens * BLOCK_TOKENS / PAGE + self._rounding
        left = max(0.0, self._prefill.left) if self._prefill is not None else 0.0
        rate = self.model.chunk_tokens / (self.model.chunk_tokens / self.model.rate + self._context * self.model.context_seconds)
        running = len(self._decodes) + (self._prefill is not None)
        self._times.append(self._now)
        step = self._recent_step if running else self.model.step_seconds
        arrivals = self._arrivals.per_second(self._now)
        self._changes.append((len(self._queue), running, max(0.0, tokens), left, rate, step, self.cache.available, arrivals))
