"""Prometheus metrics of /metrics, in a separate registry for each router."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_common.histogram import PlainHistogram
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_router.fleet.workers import WorkerTable, slices

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
RefusalReason = Literal["key", "quota", "queue", "queue_timeout", "slo", "cached_first", "hold"]
RetryReason = Literal["connect", "lost", "refused", "busy", "canary"]
_TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class Metrics:
    """Counters and histograms of the router; the workers' gauges are read from the table at scrape time."""

    def __init__(self, table: WorkerTable) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        ProcessCollector(registry=registry)
        self.requests = counter("fairlead_router_requests", "Requests by path and status code", ["path", "code"])
        other = "Requests for models of other services, which fairlead_router_requests leaves out, by that service and status code"
        self.forwarded = counter("fairlead_router_forwarded_requests", other, ["other_service", "code"])
        retries = f"Attempts given up before the first byte: {', '.join(get_args(RetryReason))}"
        self._retries = counter("fairlead_router_retries", retries, ["reason"])
        self.picks = counter("fairlead_router_picks", "Gateway requests by the endpoint picker's status code", ["code"])
        self.broken_streams = counter("fairlead_router_broken_streams", "Answers truncated because the worker's connection was lost")
        self._held = gauge("fairlead_router_held_requests", "Requests that wait for a worker")
        ttfb = "From a whole request to the first byte of its answer"
        self.ttfb = PlainHistogram("fairlead_router_ttfb_seconds", ttfb, _SECONDS, registry).labels()
        prepare = "Reading, rendering, tokenizing and hashing a prompt"
        self.overhead = PlainHistogram("fairlead_router_prepare_seconds", prepare, _SECONDS, registry).labels()
        self.predicted = counter("fairlead_router_predicted_cached_tokens", "Cached tokens that the index expected")
        self.actual = counter("fairlead_router_actual_cached_tokens", "Cached tokens that workers reported")
        error = "|predicted - actual| cached tokens"
        self.prediction_error = PlainHistogram("fairlead_router_prediction_error_tokens", error, _TOKENS, registry).labels()
        recalls = "Times that a worker was made to resync with the index after sustained prediction error"
        self.recalls = counter("fairlead_router_recalls", recalls, ["worker"])
        failures = "Failures of background tasks, each restarted after a backoff"
        self.task_failures = counter("fairlead_router_task_failures", failures, ["task"])
        self.index_unavailable = counter("fairlead_router_index_unavailable", "Requests routed while the index was unavailable")
        ignored = "Index records ignored: discovery does not list the address, or its worker reports another incarnation"
        self.ignored_records = counter("fairlead_router_ignored_records", ignored, ["reason"])
        self.index_up = gauge("fairlead_router_index_up", "1 while the index answers")
        self.index_up.set(1)
        refused = f"Requests refused before a worker: {', '.join(get_args(RefusalReason))}"
        self._refused = counter("fairlead_router_refused", refused, ["reason"])
        self.slo_requests = counter("fairlead_router_slo_requests", "Requests by service class", ["class"])
        good = "Goodput: answered requests within all bounds of their class, measured from their arrival"
        self.slo_good = counter("fairlead_router_slo_good_requests", good, ["class"])
        missed = "Answered requests that missed a bound of their class: ttft, itl"
        self.slo_missed = counter("fairlead_router_slo_missed_requests", missed, ["class", "bound"])
        rejected = "Requests rejected since no worker meets their class's bounds"
        self.slo_rejected = counter("fairlead_router_slo_rejected", rejected, ["class"])
        self.key_file_ok = gauge("fairlead_router_key_file_ok", "0 while the newest key file cannot be used")
        self.key_file_ok.set(1)
        expiry = "End of validity of the certificate for clients, in seconds since the epoch; 0 without TLS"
        self.certificate_expiry = gauge("fairlead_router_certificate_expiry_timestamp_seconds", expiry)
        self.body_bytes = gauge("fairlead_router_body_bytes", "Bytes of request bodies kept")
        self._queued = gauge("fairlead_router_queued_requests", "Requests in the queue")
        self._queued_bytes = gauge("fairlead_router_queued_bytes", "Bytes of queued request bodies")
        for by_reason, reasons in ((self._refused, RefusalReason), (self._retries, RetryReason)):
            for reason in get_args(reasons):
                by_reason.labels(reason)  # a counter that begins at 0 shows its first increase
        self._workers = WorkerGauges(table)
        self._requests: dict[tuple[str, str], Counter] = {}

    def count_refusal(self, reason: RefusalReason) -> None:
        """Count a request that is refused before a worker is tried."""
        self._refused.labels(reason).inc()

    def count_retry(self, reason: RetryReason) -> None:
        """Count an attempt that is given up before the first byte."""
        self._retries.labels(reason).inc()

    def record_prediction(self, predicted: int | None, cached: int) -> None:
        """Record the cached tokens that a worker reported, and the prediction if the index made one."""
        self.actual.inc(cached)
        if predicted is not None:
            self.predicted.inc(predicted)
            self.prediction_error.observe(abs(predicted - cached))

    def count_request(self, path: str, code: str) -> None:
        """Count a finished request by its labels `path` and `code`. Each pair's child counter is looked up once: a lookup takes a lock."""
        child = self._requests.get((path, code))
        if child is None:
            child = self._requests[path, code] = self.requests.labels(path, code)
        child.inc()

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Export what `collect` returns at scrape time."""
        self.registry.register(_Scraped(collect))

    def watch_tenants(self, used: Callable[[], Iterable[tuple[str, int, int]]]) -> None:
        """Export each tenant's prompt and output tokens from `used`: labelled counters would cost each request more."""

        def collect() -> Iterator[Metric]:
            tokens = CounterMetricFamily("fairlead_router_tenant_tokens", "Tokens used", labels=["tenant", "kind"])
            for tenant, prompt, output in used():
                tokens.add_metric([tenant, "prompt"], prompt)
                tokens.add_metric([tenant, "output"], output)
            yield tokens

        self.watch(collect)

    def watch_queue(self, count: Callable[[], float], size: Callable[[], float], held: Callable[[], float]) -> None:
        """Read the queue's requests, bytes and held requests at scrape time."""
        self._queued.set_function(count)
        self._queued_bytes.set_function(size)
        self._held.set_function(held)

    def watch_token_cache(self, cache: TokenCache) -> None:
        """Export the hits and misses of the token cache."""
        name = "fairlead_router_token_cache"
        self.watch(
            lambda: [
                CounterMetricFamily(f"{name}_hit_tokens", "Prompt tokens known from earlier prompts", value=cache.hit_tokens),
                CounterMetricFamily(f"{name}_missed_tokens", "Prompt tokens looked up and not known", value=cache.missed_tokens),
                GaugeMetricFamily(f"{name}_bytes", "Memory of the token ids of earlier prompts", value=cache.bytes),
            ]
        )

    async def render(self) -> bytes:
        """Return the exposition. Only the workers' gauges grow with the fleet, and they let other work run in between."""
        return generate_latest(self.registry) + await self._workers.render()


class _Scraped(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class WorkerGauges(Collector):
    """Gauges of each worker. A scrape renders them in slices: prometheus_client's own text would stop the event loop for a quarter of a
    second with 5,000 workers."""

    def __init__(self, table: WorkerTable) -> None:
        self._table = table

    def collect(self) -> Iterable[Metric]:
        """Return the gauges without a worker's values."""
        name = "fairlead_router_worker"
        error = "Moving average of the error of predicted cached tokens, as a share of the prompt"
        return [
            GaugeMetricFamily(f"{name}_in_flight", "Requests of this router at a worker", labels=["worker"]),
            GaugeMetricFamily(f"{name}_usable", "1 while the worker may be chosen", labels=["worker"]),
            GaugeMetricFamily(f"{name}_prediction_error_ratio", error, labels=["worker", "direction"]),
        ]

    async def render(self) -> bytes:
        """Return their text. Other work runs in between."""
        gauges = list(self.collect())
        parts = [[f"# HELP {gauge.name} {gauge.documentation}\n# TYPE {gauge.name} gauge\n"] for gauge in gauges]
        in_flight, usable, error = (gauge.name for gauge in gauges)
        for slice in slices(self._table):
            for worker in slice:
                label, wrong = f'worker="{worker.address}"', worker.prediction_error
                parts[0].append(f"{in_flight}{{{label}}} {worker.in_flight}.0\n")
                parts[1].append(f"{usable}{{{label}}} {float(worker.usable)}\n")
                parts[2].append(f'{error}{{{label},direction="over"}} {wrong.over}\n{error}{{{label},direction="under"}} {wrong.under}\n')
            await asyncio.sleep(0)
        return "".join(line for part in parts for line in part).encode()
