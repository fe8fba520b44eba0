"""The agent's own metrics, beside the engine's."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fairlead_agent.kv.follower import Follower
from fairlead_agent.state import Agent


class AgentMetrics:
    """Gauges read at scrape time, in their own registry."""

    def __init__(self, agent: Agent) -> None:
        self.follower: Follower | None = None
        """Follower of the current engine process; None: the engine is not ready, or it has no events."""
        self.registry = CollectorRegistry()
        for name, text, value in (
            ("fairlead_engine_ready", "1 if the engine is ready.", lambda: float(agent.is_serving)),
            ("fairlead_http_requests_in_flight", "Inference requests being answered.", lambda: float(agent.in_flight)),
            ("fairlead_index_joined", "1 while this worker is in the index, as far as it knows; 0 without an index.", self._joined),
            ("fairlead_index_full", "1 while Redis has no room for new blocks of this worker.", self._full),
            ("fairlead_kv_pages", "KV pages in all.", lambda: float(agent.stats.blocks)),
            ("fairlead_kv_cached_pages", "KV pages that the prefix cache holds.", lambda: float(len(agent.blocks or ()))),
            ("fairlead_backlog_tokens", "Prompt tokens submitted and not computed yet.", lambda: float(agent.load().backlog_tokens)),
            ("fairlead_prefill_tokens_per_second", "Measured prefill rate.", lambda: agent.pace.tokens_per_second),
        ):
            Gauge(name, text, registry=self.registry).set_function(value)
        self.registry.register(_Counters(self))
        self._agent = agent

    @property
    def removed_blocks(self) -> int:
        return self._agent.blocks.removed if self._agent.blocks is not None else 0

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _joined(self) -> float:
        return float(self._agent.publisher is not None and self._agent.publisher.is_joined)

    def _full(self) -> float:
        return float(self._agent.publisher is not None and self._agent.publisher.is_full)


class _Counters(Collector):
    """Counters of the current engine process."""

    def __init__(self, metrics: AgentMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily]:
        follower = self._metrics.follower
        for name, text, value in (
            ("agent_kv_event_batches_replayed", "Batches of KV events that came by replay.", follower.replayed if follower else 0),
            ("agent_kv_event_gaps", "Gaps in the KV events that replay could not fill.", follower.gaps if follower else 0),
            ("evicted_pages", "Pages evicted from the device: to the host tier, where there is one.", self._metrics.removed_blocks),
        ):
            yield CounterMetricFamily(f"fairlead_{name}", text, value=value)
