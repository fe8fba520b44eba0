"""Goodput by service class: which requests met all bounds of their class, as their clients saw it."""

from prometheus_client import Counter

from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.service_classes import ServiceClass, ServiceClasses


class SloReport:
    """Counters of requests and of those within their bounds. Each class's counters are looked up once: a lookup takes a lock."""

    def __init__(self, metrics: Metrics, classes: ServiceClasses) -> None:
        self._counters: dict[str, tuple[Counter, Counter]] = {
            name: (metrics.slo_requests.labels(name), metrics.slo_good.labels(name)) for name in classes.by_name
        }
        for name in classes.by_name:
            metrics.slo_rejected.labels(name)  # a counter that begins at 0 shows its first increase

    def record(self, call: Call, now: float) -> None:
        """Count a finished request of a class. `now`: time of its end, in monotonic seconds."""
        assert call.service_class is not None
        requests, good = self._counters[call.service_class.name]
        requests.inc()
        if is_good(call, call.service_class, now):
            good.inc()


def is_good(call: Call, service_class: ServiceClass, now: float) -> bool:
    """Return whether the request was answered within its class's bounds.

    The router sees the first token only of a stream. An answer in one piece has no time of it, so it counts if it succeeded.
    """
    if call.first_byte_at is None or not 200 <= call.status < 300 or call.ending == "broken":
        return False
    if call.held_stream is None:
        return True
    uncached = max(1, (call.prompt_tokens or 0) - (call.cached_tokens or 0))
    if service_class.bounds_ttft and call.first_byte_at - call.started_at > service_class.ttft_bound(uncached):
        return False
    tokens = call.meter.output if call.meter is not None else 0
    return tokens < 2 or (now - call.first_byte_at) / (tokens - 1) <= service_class.itl_bound
