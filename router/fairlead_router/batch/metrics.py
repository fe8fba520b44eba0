"""Prometheus metrics of `fairlead-batch`."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class BatchMetrics:
    """Metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.lines = Counter(
            "fairlead_batch_lines",
            "Lines of batches: completed, failed by their own error, or sent again",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in ("completed", "failed", "retried"):
            self.lines.labels(outcome)  # a counter that begins at 0 shows its first increase
        self.in_flight = Gauge("fairlead_batch_lines_in_flight", "Lines that the routers are answering", registry=self.registry)
        self.concurrency = Gauge("fairlead_batch_concurrency_limit", "Lines that may be in flight now", registry=self.registry)
        self.unfinished = Gauge("fairlead_batch_unfinished", "Batches that have not ended", registry=self.registry)
        self.stored_bytes = Gauge("fairlead_batch_stored_bytes", "Bytes of files and results", registry=self.registry)
        self.interruptions = Counter(
            "fairlead_batch_interruptions", "Times that a batch was interrupted by the storage or an internal error", registry=self.registry
        )

    def text(self) -> bytes:
        return generate_latest(self.registry)
