"""The agent's own metrics, beside the engine's."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlead_agent.kv.follower import Follower
from fairlead_agent.state import Agent


class AgentMetrics(Collector):
    """Values read at scrape time, in their own registry. Counters are those of the current engine process."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.follower: Follower | None = None
        """Follower of the current engine process; None: the engine is not ready, or it has no events."""
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        agent, publisher, blocks, follower = self._agent, self._agent.publisher, self._agent.blocks, self.follower
        is_joined, is_full = (False, False) if publisher is None else (publisher.is_joined, publisher.is_full)
        for name, text, value in (
            ("engine_ready", "1 if the engine is ready.", agent.is_serving),
            ("http_requests_in_flight", "Inference requests being answered.", agent.in_flight),
            ("index_joined", "1 while this worker is in the index, as far as it knows; 0 without an index.", is_joined),
            ("index_full", "1 while Redis has no room for new blocks of this worker.", is_full),
            ("kv_pages", "KV pages in all.", agent.stats.blocks),
            ("kv_cached_pages", "KV pages that the prefix cache holds.", len(blocks or ())),
            ("backlog_tokens", "Prompt tokens submitted and not computed yet.", agent.load().backlog_tokens),
            ("prefill_tokens_per_second", "Measured prefill rate.", agent.pace.tokens_per_second),
        ):
            yield GaugeMetricFamily(f"fairlead_{name}", text, value=float(value))
        for name, text, value in (
            ("agent_kv_event_batches_replayed", "Batches of KV events that came by replay.", follower.replayed if follower else 0),
            ("agent_kv_event_gaps", "Gaps in the KV events that replay could not fill.", follower.gaps if follower else 0),
            (
                "evicted_pages",
                "Pages evicted from the device: to the host tier, where there is one.",
                blocks.removed if blocks is not None else 0,
            ),
        ):
            yield CounterMetricFamily(f"fairlead_{name}", text, value=float(value))
