"""An engine in this process under a workload: the real loop, scheduler and runner, and a client that records times.

There is no HTTP and no tokenizer, so the engine alone is measured. `end_to_end/` compares whole servers with a client of their own.
"""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fairlead_index.hashing import extend
from fairlead_worker.cache.pages import PagePool
from fairlead_worker.cache.prefix import PrefixCache
from fairlead_worker.engine.loop import run_plain
from fairlead_worker.execution.runner import ModelRunner, make_runner
from fairlead_worker.ipc.messages import Failed, FromEngine, Sampling, Step, Stop, Submit, ToEngine
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.model.loader import LoadedModel
from fairlead_worker.scheduler.config import SchedulerConfig
from fairlead_worker.scheduler.scheduler import Scheduler

PAGE_SIZE = 16
BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Arrival:
    """One request of a workload, without a stop token."""

    at: float
    """Seconds from the start."""
    prompt: Sequence[int]
    output: int
    """Tokens."""
    after: tuple[int, int] | None = None
    """Start when request `after[0]` has `after[1]` output tokens, if that is later than `at`."""
    adapter: int = 0
    """Number of its LoRA adapter."""
    temperature: float = 0.0
    grammar: str = ""
    """A lowered grammar. The runner needs `grammars` for it."""


@dataclass
class Served:
    """What the client saw. Times are seconds from the workload's start."""

    arrivals: list[float]
    tokens: list[list[float]]
    """When each token of each request came."""
    steps: int = 0
    computed: int = 0
    """Positions that the model computed."""
    wasted: int = 0
    """Of these, padding and rows that had ended."""
    seconds: float = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = max(times[-1] for times in self.tokens) - min(self.arrivals)

    @property
    def ttfts(self) -> list[float]:
        return [times[0] - arrival for arrival, times in zip(self.arrivals, self.tokens, strict=True)]

    def itls(self, requests: Sequence[int] | None = None) -> list[float]:
        """Return the gaps between tokens of all requests, or of the `requests` with these numbers."""
        chosen = self.tokens if requests is None else [self.tokens[i] for i in requests]
        return [after - before for times in chosen for before, after in pairwise(times)]

    @property
    def output_rate(self) -> float:
        """Return the output tokens per second."""
        return sum(map(len, self.tokens)) / self.seconds

    def figures(self) -> dict[str, float]:
        itls = self.itls()
        return {
            "ttft_p50_ms": 1e3 * percentile(self.ttfts, 50),
            "ttft_p95_ms": 1e3 * percentile(self.ttfts, 95),
            "itl_p50_ms": 1e3 * percentile(itls, 50),
            "itl_p99_ms": 1e3 * percentile(itls, 99),
            "output_tokens_s": self.output_rate,
            "padding_share": self.wasted / max(self.computed, 1),
            "steps": self.steps,
            "seconds": self.seconds,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile with linear interpolation, as numpy does."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def runner_for(loaded: LoadedModel, pages: int, backend: str = "auto") -> ModelRunner:
    return make_runner(loaded, page_size=PAGE_SIZE, kv_pages=pages, backend=backend)


def scheduler_for(runner: ModelRunner, **settings: object) -> Scheduler:
    """Return a scheduler with an empty cache over the runner's pages. `settings` replace the engine's defaults."""
    config = SchedulerConfig(runner.loaded.max_model_len, **settings)  # type: ignore[arg-type]  # each setting has its field's type
    return Scheduler(config, PrefixCache(PagePool(runner.backend.pages, PAGE_SIZE), BLOCK_TOKENS, extend))


def serve(runner: ModelRunner, workload: Sequence[Arrival], **settings: object) -> Served:
    """Run the workload on an engine with these settings, in real time."""
    return serve_on(scheduler_for(runner, **settings), runner, workload)


def serve_on(scheduler: Scheduler, runner: ModelRunner, workload: Sequence[Arrival], adapters: AdapterSet | None = None) -> Served:
    """Run the workload on a new scheduler, which the caller may inspect afterwards."""
    client = _Client(workload)
    if run_plain(scheduler, runner, client, client, adapters=adapters, compiler=runner.grammars) != 0:
        raise RuntimeError(client.failure)
    load = scheduler.load()
    # A request's last token is not computed; nor is anything else but these: rows are packed, not padded.
    computed = load.prompt_tokens - load.cached_tokens + load.preemption_recomputed_tokens + sum(len(times) - 1 for times in client.tokens)
    return Served(client.arrived, client.tokens, load.steps, computed)


class _Client:
    """Inbox and outbox of the loop: submits each request when it is due, notes when each token comes, stops after the last."""

    def __init__(self, workload: Sequence[Arrival]) -> None:
        self._workload = workload
        self._due = sorted(range(len(workload)), key=lambda i: workload[i].at, reverse=True)
        self._ended = 0
        self.arrived = [0.0] * len(workload)
        self.tokens: list[list[float]] = [[] for _ in workload]
        self.failure = ""
        self._began = time.perf_counter()

    def receive(self, timeout: float) -> list[ToEngine]:
        if self._ended == len(self._workload):
            return [Stop()]
        now = time.perf_counter() - self._began
        ready = [i for i in self._due if self._workload[i].at <= now and self._may_come(i)]
        if not ready and timeout and self._due:  # the engine is idle until the next one
            time.sleep(min(timeout, max(self._workload[self._due[-1]].at - now, 0.0)))
            return []
        for index in ready:
            self._due.remove(index)
            self.arrived[index] = max(self._workload[index].at, 0.0) if self._workload[index].after is None else now
        return [self._message(index) for index in reversed(ready)]

    def send(self, message: FromEngine) -> None:
        now = time.perf_counter() - self._began
        if isinstance(message, Failed):
            self.failure = message.reason
        if isinstance(message, Step):
            for output in message.each():
                assert output.finish in (None, "length"), output
                self.tokens[int(output.id)].extend([now] * (len(output.tokens) // 4))
                self._ended += output.finish is not None

    def _may_come(self, index: int) -> bool:
        after = self._workload[index].after
        return after is None or len(self.tokens[after[0]]) >= after[1]

    def _message(self, index: int) -> Submit:
        wanted = self._workload[index]
        sampling = Sampling(max_tokens=wanted.output, temperature=wanted.temperature, seed=index, ignore_eos=True)
        return Submit(
            str(index),
            array("I", wanted.prompt).tobytes(),
            sampling,
            root=1 + wanted.adapter,
            adapter=wanted.adapter,
            grammar=wanted.grammar,
        )
