"""Spans of reconciles: a trace for each pass over a service, with a span for each of its requests to the API server.

The current span is a context variable, because a pass calls the API server through many functions. A task that a pass starts, such as a
probe, inherits the variable and outlives the pass: `_Pass` then has no span any more, and the requests of such a task have none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fairlead_common.telemetry.logs import bind_request
from fairlead_common.telemetry.spans import NO_SPAN, Kind, Span
from fairlead_common.telemetry.tracer import Tracer


@dataclass
class _Pass:
    span: Span


_current: ContextVar[_Pass | None] = ContextVar("reconcile that is traced", default=None)


@contextmanager
def trace_reconcile(tracer: Tracer | None, namespace: str, name: str, *, harmless: type[Exception]) -> Iterator[Span]:
    """Trace one pass over a service. `tracer`: None for no trace. An error of the type `harmless` is not a failure of the span.

    JSON log lines carry the id of the trace until the next pass, so that the line about a failed pass has it too.
    """
    if tracer is None:
        yield NO_SPAN
        return
    span = tracer.start("reconcile", (), kind="internal")
    span.set({"k8s.namespace.name": namespace, "fairlead.inference_service": name})
    bind_request("", span.trace_id)
    here = _Pass(span)
    token = _current.set(here)
    try:
        yield span
    except Exception as error:
        if not isinstance(error, harmless):
            span.fail(f"{type(error).__name__}: {error}")
        raise
    finally:
        _current.reset(token)
        here.span = NO_SPAN
        span.end()


@contextmanager
def trace_part(name: str, kind: Kind = "internal") -> Iterator[Span]:
    """Open a span within the current pass; outside of a traced pass it records nothing."""
    here = _current.get()
    if here is None or here.span is NO_SPAN:
        yield NO_SPAN
        return
    before = here.span
    with before.child(name, kind) as span:
        here.span = span
        try:
            yield span
        finally:
            here.span = before if here.span is span else NO_SPAN


def resource_of(path: str) -> str:
    """Return the resource in a path of the API server, for names of spans: `deployments`, or `inferenceservices/status`."""
    parts = path.strip("/").split("/")
    parts = parts[parts.index("namespaces") + 2 :] if "namespaces" in parts[:-2] else parts[-1:]
    return "/".join((*parts[:1], *parts[2:]))
