"""Prometheus metrics of `fairlead-batch`."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class BatchMetrics:
    """Metrics of one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self.lines = counter("fairlead_batch_lines", "Lines of batches: completed, failed by their own error, or sent again", ["outcome"])
        for outcome in ("completed", "failed", "retried"):
            self.lines.labels(outcome)  # a counter that begins at 0 shows its first increase
        self.in_flight = gauge("fairlead_batch_lines_in_flight", "Lines that the routers are answering")
        self.concurrency = gauge("fairlead_batch_concurrency_limit", "Lines that may be in flight now")
        self.unfinished = gauge("fairlead_batch_unfinished", "Batches that have not ended")
        self.stored_bytes = gauge("fairlead_batch_stored_bytes", "Bytes of files and results")
        interruptions = "Times that a batch was interrupted by the storage or an internal error"
        self.interruptions = counter("fairlead_batch_interruptions", interruptions)

    def text(self) -> bytes:
        return generate_latest(self.registry)
