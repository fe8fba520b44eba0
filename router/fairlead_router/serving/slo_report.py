"""Goodput by service class: which requests met all bounds of their class, as their clients saw it, and which bound the others missed."""

from typing import Literal

from prometheus_client import Counter

from fairlead_router.metrics import Metrics
from fairlead_router.request.client_request import Call
from fairlead_router.service_classes import ServiceClass, ServiceClasses

Bound = Literal["ttft", "itl"]


class SloReport:
    """Counters of requests and of those within their bounds. Each class's counters are looked up once: a lookup takes a lock."""

    def __init__(self, metrics: Metrics, classes: ServiceClasses) -> None:
        self._counters: dict[str, tuple[Counter, Counter]] = {
            name: (metrics.slo_requests.labels(name), metrics.slo_good.labels(name)) for name in classes.by_name
        }
        self._missed: dict[tuple[str, str], Counter] = {
            (name, bound): metrics.slo_missed.labels(name, bound)
            for name, each in classes.by_name.items()
            for bound, exists in (("ttft", each.bounds_ttft), ("itl", each.itl_milliseconds is not None))
            if exists
        }
        for name in classes.by_name:
            metrics.slo_rejected.labels(name)  # a counter that begins at 0 shows its first increase

    def record(self, call: Call, now: float) -> None:
        """Count a finished request of a class. `now`: time of its end, in monotonic seconds."""
        assert call.service_class is not None
        name = call.service_class.name
        requests, good = self._counters[name]
        requests.inc()
        if not is_answered(call):
            return
        missed = missed_bounds(call, call.service_class, now)
        for bound in missed:
            self._missed[name, bound].inc()
        if not missed:
            good.inc()


def is_answered(call: Call) -> bool:
    """Return whether the client got its answer: a success whose stream was not truncated."""
    return call.outcome.first_byte_at is not None and 200 <= call.outcome.status < 300 and call.outcome.ending != "broken"


def missed_bounds(call: Call, service_class: ServiceClass, now: float) -> tuple[Bound, ...]:
    """Return the bounds of the class that an answered request missed.

    The router sees the first token only of a stream. An answer in one piece has no time of it, so it misses none.
    """
    if call.outcome.first_byte_at is None or call.held_stream is None:
        return ()
    missed: list[Bound] = []
    uncached = max(1, (call.outcome.prompt_tokens or 0) - (call.outcome.cached_tokens or 0))
    if service_class.bounds_ttft and call.outcome.first_byte_at - call.head.started_at > service_class.ttft_bound(uncached):
        missed.append("ttft")
    tokens = call.meter.output if call.meter is not None else 0
    if tokens > 1 and (now - call.outcome.first_byte_at) / (tokens - 1) > service_class.itl_bound:
        missed.append("itl")
    return tuple(missed)
