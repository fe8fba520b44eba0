"""Prometheus metrics with the meanings of vLLM's (`vllm:…` there, `fairlead_…` here; both with `--metrics-names vllm`).

Engine metrics come from its latest report at scrape time. API metrics are recorded as they happen.
"""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_common.histogram import PlainHistogram
from fairlead_common.metric_aliases import add_aliases
from fairlead_worker.api.engine.client import EngineClient
from fairlead_worker.ipc.messages import Drafts, HostLoad, Step

LATENCY = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 20, 80)
"""Seconds: vLLM's buckets."""
SIZES = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
"""Tokens: vLLM's buckets."""
Values = Mapping[tuple[str, ...], float]
"""By the values of a metric's labels beside the model's name."""


class Metrics:
    """All metrics of one worker, in their own registry."""

    content_type = "text/plain; version=1.0.0; charset=utf-8"

    def __init__(self, engine: EngineClient, model_name: str, aliases: Mapping[str, Sequence[str]] | None = None) -> None:
        """`aliases`: other names under which the metrics are also shown."""
        self.registry = CollectorRegistry()
        self._aliases = aliases or {}
        ProcessCollector(registry=self.registry)  # process_cpu_seconds_total and others, of the API process
        self.registry.register(_EngineCollector(engine, model_name))
        labels = ("model_name",)
        finished = Counter(
            "fairlead_request_success", "Finished sequences by reason.", (*labels, "finished_reason"), registry=self.registry
        )
        self._finished = {reason: finished.labels(model_name, reason) for reason in ("stop", "length", "abort", "error")}
        self.time_to_first_token, self.queue_time, self.prefill_time, self.decode_time, self.e2e_latency = (
            Histogram(f"fairlead_{name}", text, labels, buckets=LATENCY, registry=self.registry).labels(model_name)
            for name, text in (
                ("time_to_first_token_seconds", "From the request's arrival to its first token."),
                ("request_queue_time_seconds", "From a sequence's arrival at the engine to its admission."),
                ("request_prefill_time_seconds", "From a sequence's admission to its first token."),
                ("request_decode_time_seconds", "From a sequence's first token to its last."),
                ("e2e_request_latency_seconds", "From a request's arrival to its end."),
            )
        )
        sizes = {
            name: PlainHistogram(f"fairlead_request_{name}_tokens", f"Tokens of a request's {name}.", SIZES, self.registry)
            for name in ("prompt", "generation")
        }
        self.prompt_size, self.generation_size = (size.labels(model_name=model_name) for size in sizes.values())
        gaps = PlainHistogram("fairlead_inter_token_latency_seconds", "Time between outputs of one sequence.", GAPS, self.registry)
        self.inter_token_latency = gaps.labels(model_name=model_name)
        steps = PlainHistogram("fairlead_step_seconds", "Step time by kind: prefill, decode, or mixed.", GAPS, self.registry)
        self._steps = {kind: steps.labels(model_name=model_name, kind=kind) for kind in ("prefill", "decode", "mixed")}
        stall = Counter(
            "fairlead_decode_stall_seconds",
            "Time that decodes waited for prefill in their step, summed over them.",
            labels,
            registry=self.registry,
        )
        self._stall = stall.labels(model_name)
        engine.on_step = self._record_step
        self.in_flight, self.index_joined, self.index_full = (
            Gauge(f"fairlead_{name}", text, labels, registry=self.registry).labels(model_name)
            for name, text in (
                ("http_requests_in_flight", "Inference requests being answered."),
                ("index_joined", "1 while this worker is in the index, as far as it knows; 0 without an index."),
                ("index_full", "1 while Redis has no room for new blocks of this worker."),
            )
        )

    def count_finished(self, reason: str) -> None:
        self._finished[reason].inc()

    def _record_step(self, step: Step) -> None:
        self._steps[("mixed" if step.decodes else "prefill") if step.prefill_tokens else "decode"].observe(step.seconds)
        if step.stall_seconds:
            self._stall.inc(step.stall_seconds * step.stalled)

    def render(self) -> bytes:
        return add_aliases(generate_latest(self.registry), self._aliases)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        load = self._engine.state.load
        host = load.host or HostLoad()
        used = load.pages_total - load.pages_free
        gauges = (
            ("num_requests_running", "Requests in the current step.", load.running),
            ("num_requests_waiting", "Requests that have not started.", load.waiting),
            (
                "kv_cache_usage_perc",
                "Share of KV pages that requests hold, from 0 to 1.",
                used / load.pages_total if load.pages_total else 0.0,
            ),
            ("kv_cached_pages", "KV pages that the prefix cache holds.", load.pages_cached),
            ("kv_pages", "KV pages in all.", load.pages_total),
            ("host_kv_pages", "Pages that the host tier can hold; 0: there is none.", host.total),
            ("host_kv_used_pages", "Pages that the host tier holds.", host.used),
            ("backlog_tokens", "Prompt tokens submitted and not computed yet.", load.backlog_tokens),
            ("prefill_tokens_per_second", "Measured prefill rate.", load.prefill_rate),
            ("decode_step_seconds", "Time of a decode step: mean of recent ones, or the fastest while no request runs.", load.step_seconds),
            ("engine_ready", "1 if the engine is ready.", float(self._engine.serving)),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", load.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache, in any tier.", load.cached_tokens),
            ("prompt_tokens", "Prompt tokens of admitted requests.", load.prompt_tokens),
            ("generation_tokens", "Tokens generated.", load.output_tokens),
            ("num_preemptions", "Requests that were preempted and recomputed.", load.preemptions),
            (
                "preemption_recomputed_tokens",
                "Tokens computed again because their request was preempted, less what was still cached.",
                load.preemption_recomputed_tokens,
            ),
            ("evicted_pages", "Pages evicted from the device: to the host tier, where there is one.", load.evicted_pages),
            ("host_kv_saved_pages", "Pages copied from the device to the host tier.", host.saved),
            ("host_kv_loaded_pages", "Pages copied back from the host tier.", host.loaded),
            ("host_kv_dropped_pages", "Pages dropped from the host tier.", host.dropped),
            ("engine_steps", "Steps of the engine.", load.steps),
        )
        for name, text, value in gauges:
            yield self._gauge(name, text, {(): value})
        for name, text, value in counters:
            yield self._counter(name, text, {(): value})
        tiers: Values = {("device",): load.cached_tokens - host.cached_tokens, ("host",): host.cached_tokens}
        yield self._counter("prefix_cache_tier_hits", "Prompt tokens found in the prefix cache, by tier.", tiers, ("tier",))
        if (ready := self._engine.state.ready) is not None:
            labels = ("backend", "cpu_level", "decoder", "cuda_graphs", "overlap", "piecewise_graphs")
            text = "Engine configuration: attention backend, CPU level, decoder, CUDA graphs, overlap, piecewise graphs (on or off)."
            modes = (ready.modes.cuda_graphs, ready.modes.overlap, ready.modes.piecewise_graphs)
            values = (ready.backend, ready.cpu_level, ready.decoder, *(mode.partition(":")[0] for mode in modes))
            yield self._gauge("engine_info", text, {values: 1}, labels)
            text = "1 if some CUDA graphs or overlap are off because they failed at the start. GET /server_info has the reason."
            yield self._gauge("engine_fallback", text, {(): float(bool(ready.modes.fallback))})
        phases: Values = {(phase,): seconds for phase, seconds in self._engine.state.start_up.seconds.items()}
        yield self._gauge("start_up_seconds", "Time of each phase of the start.", phases, ("phase",))
        if load.drafts is not None:
            yield from self._collect_speculation(load.drafts)

    def _collect_speculation(self, drafts: Drafts) -> Iterator[Metric]:
        """Yield speculative decoding metrics under vLLM's names. They exist only if speculation is on."""
        for name, text, value in (
            ("spec_decode_num_drafts", "Drafts verified.", drafts.rounds),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", drafts.tokens),
            ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", drafts.accepted),
        ):
            yield self._counter(name, text, {(): value})
        positions: Values = {(str(position),): count for position, count in enumerate(drafts.accepted_at)}
        text = "Drafts accepted up to this position, from 0."
        yield self._counter("spec_decode_num_accepted_tokens_per_pos", text, positions, ("position",))

    def _gauge(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
        return self._fill(GaugeMetricFamily(f"fairlead_{name}", text, labels=("model_name", *labels)), values)

    def _counter(self, name: str, text: str, values: Values, labels: tuple[str, ...] = ()) -> Metric:
        return self._fill(CounterMetricFamily(f"fairlead_{name}", text, labels=("model_name", *labels)), values)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for others, value in values.items():
            family.add_metric((self._model_name, *others), value)
        return family
