"""`/fairlead/demand`: the service's load, for an autoscaler.

A POST also reports the scale-up's progress. A GET changes nothing: operators of earlier releases send their report with one.
With `wait=SECONDS` this is a long poll: the answer comes with the next request, or after that time. The operator therefore learns of the
first request of a service scaled to zero immediately, and an idle service costs it one request a minute.

The prompt tokens of best-effort requests are not counted, since such requests use the capacity that others leave. They keep a service from
being idle, and so one worker.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any
from urllib.parse import parse_qs

import msgspec

from fairlead_router.errors import ApiError
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.request.client_request import Outcome

PATH = "/fairlead/demand"
WINDOW_SECONDS = 15
"""Averaging window of arrival rates."""
LONGEST_WAIT = 300.0
BURST_SECONDS = 0.2
"""Delay of the answer after the first request of an idle service, so that the operator sees a whole burst and scales in one step."""
HALF_LIFE = 600.0
"""Seconds after which cache hits count half."""

UniqueShares = Callable[[], Mapping[str, float]]
"""Return the share of each worker's cached blocks that no other worker holds, by address; empty without a copy of the index."""


class Arrivals:
    """Requests and prompt tokens of the last WINDOW_SECONDS, in buckets of one second."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._began = clock, clock()
        self._buckets: deque[list[int]] = deque()
        """Second, requests, prompt tokens."""

    def add(self, tokens: int) -> None:
        second = int(self._clock())
        if not self._buckets or self._buckets[-1][0] != second:
            self._trim()
            self._buckets.append([second, 0, 0])
        last = self._buckets[-1]
        last[1] += 1
        last[2] += tokens

    def rates(self) -> tuple[float, float]:
        """Return requests and prompt tokens per second."""
        self._trim()
        seconds = max(1.0, min(WINDOW_SECONDS, self._clock() - self._began))
        return sum(bucket[1] for bucket in self._buckets) / seconds, sum(bucket[2] for bucket in self._buckets) / seconds

    def _trim(self) -> None:
        oldest = self._clock() - WINDOW_SECONDS
        while self._buckets and self._buckets[0][0] < oldest:
            self._buckets.popleft()


class CacheHits:
    """Cached prompt tokens of each worker, with exponential decay."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[float, float]] = {}
        self.share = 0.0
        """Cached share of prompt tokens, a moving average over about 32 answers."""

    def add(self, worker: str, cached: int, prompt: int) -> None:
        self._tokens[worker] = (self.tokens_of(worker) + cached, self._clock())
        self.share += (min(1.0, cached / prompt) - self.share) / 32

    def tokens_of(self, worker: str) -> float:
        tokens, at = self._tokens.get(worker, (0.0, 0.0))
        return tokens * math.exp2((at - self._clock()) / HALF_LIFE)

    def retain(self, workers: set[str]) -> None:
        self._tokens = {address: known for address, known in self._tokens.items() if address in workers}


class Demand:
    """Load of the service. Call `request_started` and `request_ended` around each request."""

    def __init__(
        self,
        table: WorkerTable,
        scale_up: ScaleUpStatus,
        queued: Callable[[], tuple[int, int]],
        unique_shares: UniqueShares,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._table, self._scale_up, self._queued, self._unique_shares, self._clock = table, scale_up, queued, unique_shares, clock
        self._arrivals, self._hits = Arrivals(clock), CacheHits(clock)
        self._active = 0
        self._last = clock()
        self._rate = self._answer_seconds = 0.0
        self._has_requests = asyncio.Event()
        self._draining = False

    def request_started(self, tokens: int = 0) -> None:
        """Record the arrival of a request with a prompt of `tokens`; 0: it calls for no more than one worker."""
        self._active += 1
        if tokens:
            self._arrivals.add(tokens)
        self._has_requests.set()

    def request_ended(self, outcome: Outcome | None = None) -> None:
        """Record the end of a request, whatever its outcome."""
        self._active -= 1
        self._last = self._clock()
        if outcome is not None and outcome.first_byte_at is not None:
            self._answer_seconds += (self._last - outcome.first_byte_at - self._answer_seconds) / (16 if self._answer_seconds else 1)
        if outcome is not None and outcome.cached_tokens is not None and outcome.prompt_tokens:
            self._hits.add(outcome.worker, outcome.cached_tokens, outcome.prompt_tokens)
        if not self._active:
            self._has_requests.clear()

    def count_external(self, tokens: int) -> None:
        """Count a request that a gateway sends to a worker directly."""
        self.request_started(tokens)
        self.request_ended()

    def drain(self) -> None:
        """Answer long polls immediately from now on."""
        self._draining = True
        self._has_requests.set()

    async def answer(self, query: bytes, *, takes_report: bool) -> bytes:
        """Return the page as JSON. Raises ApiError 400 for a parameter that is not a number or out of range.

        `takes_report`: store the report in the parameters. `wait`: seconds. `wanted`, `starting`, `seconds`, `reason`, `advancing`: as in
        `ScaleUpStatus.update`. `unique_shares=1`: include the share of each worker's cache that no other worker holds.
        """
        params = _numbers(query)
        if takes_report and "wanted" in params:
            starting, seconds, advancing = int(params.get("starting", 0)), params.get("seconds", 0.0), params.get("advancing", 0.0) > 0
            self._scale_up.update(int(params["wanted"]), starting, seconds, _text(query, "reason"), advancing)
        if (wait := min(LONGEST_WAIT, params.get("wait", 0.0))) > 0 and not self._busy:
            try:
                async with asyncio.timeout(wait):
                    await self._has_requests.wait()
                if not self._draining:
                    await asyncio.sleep(BURST_SECONDS)
            except TimeoutError:
                pass
        return msgspec.json.encode(self.page(with_unique_shares=params.get("unique_shares", 0.0) > 0))

    @property
    def _busy(self) -> bool:
        return bool(self._active or self._draining or self._queued()[0])

    def page(self, with_unique_shares: bool) -> dict[str, Any]:
        """Return the load now. The operator reads it as a `RouterReport`."""
        workers = list(self._table)
        measured = [worker.load.prefill_rate for worker in workers if worker.usable and worker.load.prefill_rate > 0]
        self._rate = sum(measured) / len(measured) if measured else self._rate
        self._hits.retain({worker.address for worker in workers})
        requests, tokens = self._arrivals.rates()
        waiting, waiting_tokens = self._queued()
        unique_shares = self._unique_shares() if with_unique_shares else {}
        return {
            "idle_seconds": 0.0 if self._busy else round(self._clock() - self._last, 1),
            "active": self._active,
            "queued": waiting,
            "queued_tokens": waiting_tokens,
            "requests_per_second": round(requests, 3),
            "prompt_tokens_per_second": round(tokens, 1),
            "cached_share": round(self._hits.share, 4),
            "answer_seconds": round(self._answer_seconds, 3),
            "prefill_rate": round(self._rate, 1),  # kept when no worker is left: the next workers will be like the last
            "draining": self._draining,
            "workers": [self._worker(worker, unique_shares) for worker in sorted(workers, key=lambda worker: worker.address)],
        }

    def _worker(self, worker: Worker, unique_shares: Mapping[str, float]) -> dict[str, Any]:
        load = worker.load
        return {
            "pod": worker.pod,
            "address": worker.address,
            "usable": worker.usable,
            "running": load.running,
            "waiting": load.waiting,
            "backlog_tokens": load.backlog_tokens,
            "pending_tokens": worker.pending_tokens,
            "prefill_rate": round(load.prefill_rate, 1),
            "step_seconds": round(load.step_seconds, 5),
            "max_running": worker.max_running,
            "pages_free": load.pages_free,
            "pages_total": load.pages_total,
            "hit_tokens": round(self._hits.tokens_of(worker.address)),
            "unique_share": unique_shares.get(worker.address),
        }


def _text(query: bytes, name: str) -> str:
    return parse_qs(query.decode("latin-1")).get(name, [""])[-1]


def _numbers(query: bytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, values in parse_qs(query.decode("latin-1")).items():
        if name == "reason":
            continue
        try:
            found[name] = float(values[-1])
        except ValueError:
            raise ApiError(400, f"{name[:50]} must be a number (got {values[-1][:50]!r}).", param=name[:50]) from None
        if not 0 <= found[name] < 1e9:
            raise ApiError(400, f"{name[:50]} must be between 0 and a billion (got {values[-1][:50]!r}).", param=name[:50])
    return found
