"""`--metrics-names vllm`: metrics of the workers with the names of vLLM's production-stack router, for its dashboards.

The label `server` is the worker's URL, as there. Windowed metrics use the same window of one minute.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.request.client_request import Call

WINDOW_SECONDS: Final = 60.0
LATENCY: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Seconds; production-stack's buckets."""


@dataclass(slots=True)
class _WorkerStats:
    """Statistics of the requests that one worker answered."""

    recent: deque[tuple[float, float]] = field(default_factory=deque)
    """End and duration of each request of the last minute, seconds."""
    prompt_tokens: int = 0
    reported_tokens: int = 0
    """Prompt tokens of answers that reported their cached tokens."""
    cached_tokens: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY) + 1))
    seconds: float = 0.0


class StackMetrics(Collector):
    """Collector that records each finished request. A scrape drops workers that have left the table."""

    def __init__(self, table: WorkerTable, model: Callable[[], str], clock: Callable[[], float] = monotonic) -> None:
        self._table, self._model, self._clock = table, model, clock
        self._servers: dict[str, _WorkerStats] = {}
        self._incoming = 0

    def record(self, call: Call) -> None:
        """Record a finished request with a prompt."""
        self._incoming += 1
        if not call.outcome.worker or call.outcome.first_byte_at is None:
            return
        now = self._clock()
        took = now - call.head.started_at
        server = self._servers.setdefault(call.outcome.worker, _WorkerStats())
        server.recent.append((now, took))
        self._trim(server, now)
        server.prompt_tokens += call.outcome.prompt_tokens or 0
        if call.outcome.cached_tokens is not None:
            server.reported_tokens += call.outcome.prompt_tokens or 0
            server.cached_tokens += call.outcome.cached_tokens
        server.buckets[next((at for at, bound in enumerate(LATENCY) if took <= bound), len(LATENCY))] += 1
        server.seconds += took

    def collect(self) -> Iterator[Metric]:
        workers = sorted(self._table, key=lambda worker: worker.address)
        now, model = self._clock(), self._model()
        self._servers = {worker.address: self._servers.get(worker.address, _WorkerStats()) for worker in workers}
        gauges = {
            name: GaugeMetricFamily(f"vllm:{name}", text, labels=["server"])
            for name, text in (
                ("healthy_pods_total", "1 while the worker may be chosen"),
                ("num_requests_running", "Requests in the worker's step"),
                ("num_requests_waiting", "Requests that wait at the worker"),
                ("gpu_cache_usage_perc", "KV pages that requests hold, 1 being all"),
                ("gpu_prefix_cache_hit_rate", "Cached tokens of all prompt tokens"),
                ("current_qps", "Answers of the last minute, a second"),
                ("avg_latency", "Seconds of the last minute's answers"),
            )
        }
        hits = CounterMetricFamily("vllm:gpu_prefix_cache_hits", "Prompt tokens that were cached", labels=["server"])
        queries = CounterMetricFamily("vllm:gpu_prefix_cache_queries", "Prompt tokens of answers that say so", labels=["server"])
        tokens = CounterMetricFamily("vllm:input_tokens", "Prompt tokens", labels=["server", "model"])
        latency = HistogramMetricFamily("vllm:request_latency_seconds", "From request to the answer's end", labels=["server", "model"])
        for worker in workers:
            server, load, label = self._servers[worker.address], worker.load, [f"http://{worker.address}"]
            self._trim(server, now)
            values = {
                "healthy_pods_total": float(worker.usable),
                "num_requests_running": load.running,
                "num_requests_waiting": load.waiting,
                "gpu_cache_usage_perc": 1 - load.pages_free / load.pages_total if load.pages_total else 0.0,
                "gpu_prefix_cache_hit_rate": server.cached_tokens / server.reported_tokens if server.reported_tokens else 0.0,
                "current_qps": len(server.recent) / WINDOW_SECONDS,
                "avg_latency": sum(took for _, took in server.recent) / len(server.recent) if server.recent else 0.0,
            }
            for name, value in values.items():
                gauges[name].add_metric(label, value)
            hits.add_metric(label, server.cached_tokens)
            queries.add_metric(label, server.reported_tokens)
            tokens.add_metric([*label, model], server.prompt_tokens)
            seen, rows = 0, []
            for bound, count in zip((*map(str, LATENCY), "+Inf"), server.buckets, strict=True):
                seen += count
                rows.append((bound, float(seen)))
            latency.add_metric([*label, model], rows, server.seconds)
        incoming = CounterMetricFamily("vllm:num_incoming_requests", "Requests for a completion", labels=["model"])
        incoming.add_metric([model], self._incoming)
        yield from (*gauges.values(), hits, queries, tokens, latency, incoming)

    def _trim(self, server: _WorkerStats, now: float) -> None:
        while server.recent and server.recent[0][0] < now - WINDOW_SECONDS:
            server.recent.popleft()
