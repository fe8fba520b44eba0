"""Log lines as JSON, and tracing that is off, or cannot work."""

import json
import logging
import sys

import pytest
from tests.servers.otlp_receiver import otlp_receiver

from fairlead_common.telemetry.logs import JsonFormatter, bind_request
from fairlead_common.telemetry.spans import NO_SPAN, read_trace_id
from fairlead_common.telemetry.tracer import TracingError, create_tracer

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(autouse=True)
def without_otel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def make_record(message: str, *arguments: object, exc_info: object = None) -> logging.LogRecord:
    return logging.LogRecord("fairlead_worker.api", logging.WARNING, "file", 1, message, arguments, exc_info)  # type: ignore[arg-type]


def test_a_record_is_one_json_line_with_all_fields() -> None:
    bind_request("request-1", TRACE)
    line = JsonFormatter("engine").format(make_record("several\nlines of %s \udcff", "text"))
    assert "\n" not in line
    document = json.loads(line)
    assert document.pop("time").endswith("Z")
    assert document == {
        "level": "WARNING",
        "logger": "fairlead_worker.api",
        "message": "several\nlines of text ?",
        "request_id": "request-1",
        "trace_id": TRACE,
        "process": "engine",
    }


def test_an_exception_stays_on_its_line() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = JsonFormatter().format(make_record("it failed", exc_info=sys.exc_info()))
    assert "\n" not in line and json.loads(line)["exception"].endswith("ValueError: broken")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(f"00-{TRACE}-b7ad6b7169203331-01", TRACE), (f"00-{TRACE[1:]}-b7ad6b7169203331-01", ""), ("x", ""), ("", "")],
)
def test_the_trace_id_of_a_valid_traceparent_is_read(value: str, expected: str) -> None:
    assert read_trace_id([(b"accept", b"*"), (b"traceparent", value.encode())]) == expected


def test_without_an_endpoint_there_is_no_tracer_and_spans_do_nothing() -> None:
    assert create_tracer("service", "", {}) is None
    with NO_SPAN.child("part") as span:
        span.set({"key": 1})
    assert span is NO_SPAN and span.propagate() == [] and not span.is_recording


def test_the_flag_names_the_collector_and_the_last_spans_are_exported_at_the_end() -> None:
    with otlp_receiver() as receiver:
        tracer = create_tracer("service", receiver.endpoint, {"fairlead.model": "tiny"})
        assert tracer is not None
        with tracer.start("request", [(b"traceparent", f"00-{TRACE}-b7ad6b7169203331-01".encode())]) as request:
            request.set({"kept": 1, "absent": None})
            with pytest.raises(KeyError), request.child("part"):
                raise KeyError
            (header,) = request.propagate()
        tracer.close()
        by_name = {span.name: span for span in receiver.of_trace(TRACE)}
    assert header == (b"traceparent", f"00-{TRACE}-{by_name['request'].span_id}-01".encode())
    assert by_name["request"].attributes == {"kept": 1} and by_name["request"].service == "service"
    assert by_name["part"].failed and by_name["part"].parent_id == by_name["request"].span_id


def test_standard_variables_turn_tracing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert create_tracer("service", "http://127.0.0.1:4318", {}) is None


def test_what_cannot_work_is_an_error_that_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TracingError, match="http://collector:4318"):
        create_tracer("service", "collector:4318", {})
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(TracingError, match="http/protobuf or grpc"):
        create_tracer("service", "http://127.0.0.1:4318", {})
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(TracingError, match=r"pip install 'fairlead\[tracing\]'"):
        create_tracer("service", "http://127.0.0.1:4318", {})


def test_an_environment_that_cannot_work_is_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    assert create_tracer("service", "", {}) is None
    assert "no traces are sent" in caplog.text and "fairlead[tracing]" in caplog.text
