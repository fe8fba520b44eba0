"""Tracing with OpenTelemetry's SDK, which only this file imports, and only if an endpoint is set (the extra `fairlead[tracing]`).

The standard `OTEL_*` variables apply: the SDK reads sampler, limits, resource and batching, the exporter its endpoint, headers, TLS and
timeouts. The batch processor has a bounded queue and drops spans when it is full; it exports in its own thread, so a slow or missing
collector costs spans and no request.
"""

import logging
import os
import threading
import time
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import urlsplit

from fairlead_common.telemetry.spans import NO_SPAN, Headers, Kind, Span, Value

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger(__name__)

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
HTTP, GRPC = "http/protobuf", "grpc"
FLUSH_SECONDS = 2.0
"""Longest time for the last spans when the process ends."""


class TracingError(ValueError):
    """Tracing is wanted and cannot work."""


class RecordedSpan(Span):
    """A span of the SDK. It may still be unsampled: then it only carries the trace on."""

    __slots__ = ("_is_open", "_offset", "_span", "_tracer", "is_recording", "trace_id")

    def __init__(self, tracer: "Tracer", span: "OtelSpan", offset: int) -> None:
        """`offset`: nanoseconds between `time.monotonic` and Unix time, the same for all spans of a request in this process."""
        self._tracer, self._span, self._offset = tracer, span, offset
        self._is_open = True
        self.is_recording = span.is_recording()
        self.trace_id = format(span.get_span_context().trace_id, "032x")

    def child(self, name: str, kind: Kind = "internal", start: float | None = None) -> Span:
        if not self.is_recording:
            return self if kind == "client" else NO_SPAN
        return self._tracer.start_child(self._span, name, kind, self._offset, start)

    def set(self, attributes: Mapping[str, Value | None]) -> None:
        if self.is_recording:
            self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def fail(self, reason: str) -> None:
        if self.is_recording:
            self._tracer.mark_failed(self._span, reason)

    def end(self, at: float | None = None) -> None:
        if self._is_open:
            self._is_open = False
            self._span.end(_nanoseconds(self._offset, at))

    def propagate(self) -> list[tuple[bytes, bytes]]:
        return self._tracer.inject(self._span)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.fail(type(error).__name__)
        self.end()


class Tracer:
    """Starts a process's spans and exports them. `create_tracer` returns one, or None if tracing is off."""

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry import propagate, trace

        self._provider, self._trace = provider, trace
        self._propagator = propagate.get_global_textmap()
        self._tracer = provider.get_tracer("fairlead")
        self._kinds = {"server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL}
        self.header_names = frozenset(name.lower().encode() for name in self._propagator.fields)
        """Headers that carry a trace: a proxy replaces them by those of its own span."""

    def start(self, name: str, headers: Headers, start: float | None = None, kind: Kind = "server") -> Span:
        """Return the span of a request that this process serves, within the trace of its headers. Invalid ones start a new trace.

        Work that no request caused has no headers and the kind `internal`.
        """
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers if key in self.header_names}
        context = self._propagator.extract(carrier)
        offset = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, context, self._kinds[kind], start_time=_nanoseconds(offset, start))
        return RecordedSpan(self, span, offset)

    def start_child(self, parent: "OtelSpan", name: str, kind: Kind, offset: int, start: float | None) -> Span:
        context = self._trace.set_span_in_context(parent)
        span = self._tracer.start_span(name, context, self._kinds[kind], start_time=_nanoseconds(offset, start))
        return RecordedSpan(self, span, offset)

    def inject(self, span: "OtelSpan") -> list[tuple[bytes, bytes]]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in carrier.items()]

    def mark_failed(self, span: "OtelSpan", reason: str) -> None:
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, reason))

    def close(self) -> None:
        """Export the last spans, for `FLUSH_SECONDS` at most: a missing collector must not delay the end of the process."""
        thread = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


def create_tracer(service: str, endpoint: str, attributes: Mapping[str, str]) -> Tracer | None:
    """Return a tracer, or None without an endpoint in the flag or in `OTEL_*`, or if `OTEL_*` disables it.

    `endpoint`: URL of an OTLP collector; empty: from the environment. `attributes`: of the resource, below `OTEL_RESOURCE_ATTRIBUTES`.
    Raises TracingError for an invalid endpoint or a missing package. If only the environment asks for traces, which may be that of a whole
    cluster, this is a warning.
    """
    if not endpoint and not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    try:
        return _create(service, endpoint, attributes)
    except TracingError as error:
        if endpoint:
            raise
        logger.warning("no traces are sent: %s", error)
        return None


def _create(service: str, endpoint: str, attributes: Mapping[str, str]) -> Tracer:
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError(f"tracing needs OpenTelemetry ({error.name} is missing): pip install 'fairlead[tracing]'") from error
    exporter = _create_exporter(endpoint)
    named = {"service.name": service, **attributes}
    resource = Resource.create({}).merge(Resource(named)).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider)


def _create_exporter(endpoint: str) -> Any:
    protocol = next((value for name in _PROTOCOLS if (value := os.environ.get(name))), HTTP)
    if protocol == HTTP:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=_traces_url(endpoint) if endpoint else None)
    if protocol != GRPC:
        raise TracingError(f"{_PROTOCOLS[1]} {protocol!r} is not supported: give {HTTP} or {GRPC}")
    try:
        grpc = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    except ImportError as error:
        package = "opentelemetry-exporter-otlp-proto-grpc"
        raise TracingError(f"{_PROTOCOLS[1]} {GRPC} needs the package {package}: install it, or give {HTTP} (port 4318)") from error
    return grpc.OTLPSpanExporter(endpoint=endpoint or None)


def _traces_url(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise TracingError(f"--otlp-traces-endpoint {endpoint!r} is no URL; give one as in http://collector:4318")
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def _nanoseconds(offset: int, at: float | None) -> int:
    return offset + (time.monotonic_ns() if at is None else int(at * 1e9))
