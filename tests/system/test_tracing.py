"""A router process and a worker with its engine, traced: one trace has the spans of all of them, and a dead collector harms nothing."""

import json
from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from tests.servers.otlp_receiver import ReceivedSpan, Receiver, otlp_receiver
from tests.servers.redis_server import RedisServer
from tests.system.processes import NAMESPACE, Fleet, engine_worker, until

from fairlead.random_model.build import make_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
PROMPT = [10 + number % 900 for number in range(200)]


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Receiver]]:
    folder = tmp_path_factory.mktemp("fleet")
    model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
    with RedisServer() as redis, otlp_receiver() as receiver, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "128")  # small enough for the last test to fill
        patch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "64")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        fleet = Fleet(folder, workers=0, routers=1, redis=redis.url, flags=["--log-format", "json"])
        settings = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE}
        flags = ("--log-format", "json", "--chunked-prefill-size", "64", "--max-prefill-tokens", "64")
        fleet.add_process("pod-0", *engine_worker(folder, model, "pod-0", *flags, **settings))
        with fleet:
            yield fleet, receiver


def ask(fleet: Fleet, traceparent: str, prompt: list[int] = PROMPT, **body: object) -> httpx.Response:
    (url,) = fleet.routers
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0} | body
    headers = {"traceparent": traceparent, "x-request-id": f"id-{traceparent[3:9]}"}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def spans_of(receiver: Receiver, trace: str) -> list[ReceivedSpan]:
    services = lambda: {span.service for span in receiver.of_trace(trace) if span.name.startswith("POST")}  # noqa: E731
    until(lambda: services() == {"fairlead-router", "fairlead-worker"}, "both processes exported their request spans", 30)
    return receiver.of_trace(trace)


def test_one_trace_has_the_spans_of_router_and_worker_and_engine(traced: tuple[Fleet, Receiver]) -> None:
    fleet, receiver = traced
    assert ask(fleet, SAMPLED).status_code == 200
    spans = spans_of(receiver, TRACE)
    by_id = {span.span_id: span for span in spans}
    paths = {(span.service.removeprefix("fairlead-"), span.name, span.parent_id) for span in spans}
    (router,) = (span for span in spans if span.service == "fairlead-router" and span.name.startswith("POST"))
    (worker,) = (span for span in spans if span.service == "fairlead-worker" and span.name.startswith("POST"))
    assert router.parent_id == PARENT, "the client's span is the parent"
    assert {("router", name, router.span_id) for name in ("tokenize", "queue", "route", "attempt")} <= paths
    assert by_id[worker.parent_id].name == "attempt"
    assert {("worker", name, worker.span_id) for name in ("queue", "prefill chunk", "decode")} <= paths
    chunks = [span for span in spans if span.name == "prefill chunk"]
    assert [(span.attributes["fairlead.start"], span.attributes["fairlead.tokens"]) for span in chunks] == [
        (0, 64),
        (64, 64),
        (128, 64),
        (192, 8),
    ]
    decode = next(span for span in spans if span.name == "decode")
    assert decode.attributes["gen_ai.usage.output_tokens"] == 4
    assert worker.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert all(span.started <= span.ended for span in spans)
    assert worker.started <= chunks[0].started <= chunks[-1].started <= decode.started <= decode.ended <= worker.ended
    assert not any(span.failed for span in spans)


def test_the_router_reports_predicted_and_actual_cached_tokens(traced: tuple[Fleet, Receiver]) -> None:
    fleet, receiver = traced
    prompt = [token + 7 for token in PROMPT]
    assert ask(fleet, SAMPLED, prompt).status_code == 200
    trace, others = "1" * 32, count(1)

    def found() -> set[tuple[int, int]]:
        """Return the predicted and actual tokens of the router's spans that have a prediction."""
        routes = [span for span in receiver.of_trace(trace) if span.name.startswith("POST") and span.service == "fairlead-router"]
        pairs = [tuple(span.attributes[f"fairlead.{kind}_tokens"] for kind in ("predicted_cached", "cached")) for span in routes]
        return {pair for pair in pairs if pair[0]}

    def is_predicted() -> bool:  # the worker publishes its blocks soon after they are computed
        ask(fleet, f"00-{trace}-{PARENT}-01", [*prompt, next(others)])  # an exact repeat would have all of its tokens but one cached
        return bool(found())

    until(is_predicted, "the index shows the prefix", 30)
    assert found() == {(192, 192)}


def test_an_unsampled_trace_is_exported_by_nobody_and_continues_at_the_worker(traced: tuple[Fleet, Receiver]) -> None:
    fleet, receiver = traced
    unsampled, later = "2" * 32, "3" * 32
    assert ask(fleet, f"00-{unsampled}-{PARENT}-00").status_code == 200
    assert ask(fleet, f"00-{later}-{PARENT}-01").status_code == 200
    spans_of(receiver, later)
    assert receiver.of_trace(unsampled) == []
    assert f'"trace_id":"{unsampled}"' in fleet.worker("pod-0").log


def test_json_lines_carry_request_id_and_trace_id(traced: tuple[Fleet, Receiver]) -> None:
    fleet, _ = traced
    trace = "4" * 32
    assert ask(fleet, f"00-{trace}-{PARENT}-01").status_code == 200
    (router,) = fleet.routers.values()
    for process, logger in ((router, "fairlead_router.access"), (fleet.worker("pod-0"), "fairlead_worker.api.generation.run")):
        until(lambda process=process: trace in process.log, f"{process.name} logs the request", 20)  # type: ignore[misc]
        lines = [json.loads(line) for line in process.log.splitlines()]
        assert all({"time", "level", "logger", "message", "request_id", "trace_id"} <= line.keys() for line in lines)
        (line,) = (line for line in lines if line["trace_id"] == trace)
        assert (line["request_id"], line["logger"], line["level"]) == ("id-" + "4" * 6, logger, "INFO")


def test_a_dead_collector_harms_no_request_and_delays_no_exit(traced: tuple[Fleet, Receiver]) -> None:
    """The last test of the fleet: its spans fill the queues and are dropped."""
    fleet, receiver = traced
    receiver.stop()
    assert {ask(fleet, f"00-{number:032x}-{PARENT}-01").status_code for number in range(100, 150)} == {200}
    for process in (*fleet.routers.values(), fleet.worker("pod-0")):
        until(lambda process=process: "export" in process.log, f"{process.name} says that it cannot export", 30)  # type: ignore[misc]
        process.signal(15)
        assert process.wait(20) == 0
