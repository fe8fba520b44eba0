"""A modelled worker that runs the engine's scheduler and cache step by step; only the time of a step is modelled.

It is exact where `Pod` counts alike steps as a flow: several prompts in a step, chunks, and requests and reports that wait for the end of
the step in flight. It calls the scheduler for each step.
"""

import bisect
from array import array
from dataclasses import dataclass
from itertools import count

from fairlead.simulate.pods import Progress
from fairlead.simulate.workloads.request import Request
from fairlead_index.arrival_rate import ArrivalRate
from fairlead_index.worker_load import WorkerLoad
from fairlead_worker.api.engine.index_publisher import to_worker_load
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.ipc.messages import CacheEvent, Sampling, Submit
from fairlead_worker.scheduler.chunk_sizer import Work, prefill_work
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.plan import StepPlan, StepResult
from fairlead_worker.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineModel:
    """`costs`: seconds of each term of a step (`Work`). A page is one block of the index: `page_tokens`, `cache_blocks` of them.

    `between_seconds`: from the end of a step to the start of the next. `arrival_seconds`: what the API process takes from a step in
    flight for each request, because both processes share one CPU limit. `idle_credit`: how much sooner the first step of an idle worker
    ends, because its CPU quota is unspent. All three are 0 where API process and engine have cores of their own.
    """

    config: SchedulerConfig
    cache_blocks: int
    page_tokens: int
    costs: Work
    report_seconds: float = 0.5
    start_seconds: float = 60.0
    between_seconds: float = 0.0
    arrival_seconds: float = 0.0
    idle_credit: float = 0.0

    @property
    def max_running(self) -> int:
        return self.config.max_num_seqs

    def seconds(self, work: Work) -> float:
        """Return the time of a step."""
        return sum(cost * term for cost, term in zip(self.costs, work, strict=True))


class EnginePod:
    """One worker, with the interface of `Pod`."""

    def __init__(self, model: EngineModel, phase: float, started: float = 0.0) -> None:
        self.model = model
        self.computed = 0
        """Prompt tokens computed so far."""
        self.cache = PrefixCache(PagePool(model.cache_blocks, model.page_tokens), model.page_tokens, _hash_of)
        self._scheduler = Scheduler(model.config, self.cache)
        chunk = max(1, min(model.config.chunked_prefill_size, model.config.max_prefill_tokens))
        self._scheduler.stats.record_warmup_decode(model.seconds((0.0, 0.0, 1.0, 1.0, 1.0)))
        self._scheduler.stats.record_warmup(chunk, model.seconds((prefill_work(0, chunk), chunk, 0.0, 0.0, 1.0)))
        self._phase = phase
        self._numbers = count()
        self._arrivals = ArrivalRate()
        self._inbox: list[Submit] = []
        """Requests that arrived during the step in flight."""
        self._step: tuple[StepPlan, float, float] | None = None
        """The step in flight, its seconds and its end."""
        self._events: list[CacheEvent] = []
        self._times: list[float] = []
        self._loads: list[WorkerLoad] = []
        self._note(started)

    def add(self, request: Request, now: float) -> int:
        """Queue a request, now. Return its number. Raises ValueError if it can never run here."""
        number = next(self._numbers)
        self._arrivals.record(now)
        sampling = Sampling(max_tokens=max(1, request.output_tokens), ignore_eos=True)
        self._inbox.append(Submit(str(number), _tokens_of(request, self.model.page_tokens), sampling, root=1))
        if self._step is None:
            self._begin(now, was_idle=True)
        else:
            plan, seconds, end = self._step
            self._step = plan, seconds + self.model.arrival_seconds, end + self.model.arrival_seconds
        return number

    def next_event(self) -> float:
        """Return the end of the step in flight; infinity for an idle pod."""
        return self._step[2] if self._step is not None else float("inf")

    def advance(self, now: float) -> list[Progress]:
        """End the step in flight if its time has come, and begin the next. Return what became of requests."""
        if self._step is None or now < self._step[2]:
            return []
        plan, seconds, _ = self._step
        sampling = [(row.request, row.request.output_length == 0) for row in plan.rows if row.samples]
        self.computed += plan.prefill_tokens
        self._scheduler.advance(plan, StepResult([[0] for _ in sampling], seconds=seconds))
        ended = []
        for request, is_first in sampling:
            number, cached = int(request.id), request.history.first_cached or 0
            ended += [Progress(number, cached)] if is_first else []
            ended += [Progress(number, cached, is_last=True)] if request.finish is not None else []
        self._events += self._scheduler.drain_events()
        self._begin(now, was_idle=False)
        return ended

    @property
    def is_idle(self) -> bool:
        return self._step is None

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """Return what the index learns: the blocks stored, promised and removed up to the end of the last step."""
        events, self._events = tuple(self._events), []
        return events

    def load(self, now: float) -> tuple[float, WorkerLoad]:
        """Return the time of the worker's newest load report, and the report."""
        every = self.model.report_seconds
        at = now if every <= 0 else max(0.0, (now - self._phase) // every * every + self._phase)
        return at, self.load_at(at)

    def load_at(self, at: float) -> WorkerLoad:
        """Return the load that the engine had reported at a past moment: that of the end of a step."""
        return self._loads[max(0, bisect.bisect_left(self._times, at) - 1)]

    def _begin(self, now: float, was_idle: bool) -> None:
        """Plan the next step, if there is work."""
        self._note(now)
        scheduler = self._scheduler
        for message in self._inbox:
            if (refused := scheduler.submit(message)) is not None:
                raise ValueError(f"the modelled worker refuses a request: {refused.error}")
        self._inbox.clear()
        plan = scheduler.plan()
        if not plan:
            self._step = None
            return
        context = sum(row.start for row in plan.rows if row.request.output_length)
        seconds = self.model.seconds((plan.prefill_work, plan.prefill_tokens, context, plan.decodes, 1.0))
        seconds = max(0.0, seconds - self.model.idle_credit) if was_idle else seconds
        self._step = plan, seconds, now + seconds + (0.0 if was_idle else self.model.between_seconds)

    def _note(self, now: float) -> None:
        self._times.append(now)
        self._loads.append(to_worker_load(self._scheduler.load(), self.model.page_tokens, self._arrivals.per_second(now)))


def _tokens_of(request: Request, page_tokens: int) -> bytes:
    """Return tokens such that equal blocks have equal tokens. The first two tokens of a block are its hash."""
    padding = bytes(4 * (page_tokens - 2))
    return b"".join(block.to_bytes(8, "little") + padding for block in request.blocks)[: 4 * request.prompt_tokens]


def _hash_of(parent: int, block: "array[int]") -> int:
    return block[0] | block[1] << 32
