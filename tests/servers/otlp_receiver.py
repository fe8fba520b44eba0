"""A real OTLP/HTTP receiver in the test process: it stores the spans that processes export."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started: int
    ended: int
    failed: bool
    attributes: dict[str, Any]


@dataclass
class Receiver:
    endpoint: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """Return the spans of a trace, in the order in which they began."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.started)

    def add(self, request: ExportTraceServiceRequest) -> None:
        for of_resource in request.resource_spans:
            resource = _attributes(of_resource.resource.attributes)
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                    times = span.start_time_unix_nano, span.end_time_unix_nano
                    failed = span.status.code == span.status.STATUS_CODE_ERROR
                    self.spans.append(ReceivedSpan(resource["service.name"], span.name, *ids, *times, failed, _attributes(span.attributes)))


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Yield a receiver that listens on a free loopback port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            receiver.add(ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            body = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    receiver.stop = stop
    yield receiver
    stop()


def _attributes(given: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in given}
