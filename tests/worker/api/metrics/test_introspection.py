"""Observability of requests and steps: histograms, one log line per request, and the schedule trace."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.worker.api.admin.test_adapters import End
from tests.worker.api.process import WorkerProcess, until

from fairlead.main import main
from fairlead_common.schedule.trace import parse
from fairlead_worker.api.admin.schedule import read_end
from fairlead_worker.api.engine.start_up import StartUp
from fairlead_worker.api.metrics.worker_metrics import Metrics
from fairlead_worker.config import WorkerConfig
from fairlead_worker.engine_process import run
from fairlead_worker.ipc.messages import HostLoad, Load

SECRET = "Nobody may read this sentence in a log. "


def lines(worker: WorkerProcess, request: str) -> list[dict[str, Any]]:
    found = re.findall(r"finished (\{.*\})$", worker.log.read_text(), re.M)
    return [line for line in map(json.loads, found) if line["request"] == request]


def ask(worker: WorkerProcess, name: str, **body: Any) -> dict[str, Any]:
    response = worker.client.post("/v1/completions", json={"prompt": SECRET * 9, **body}, headers={"X-Request-Id": name})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_finished_request_leaves_one_line_without_its_words(shared: WorkerProcess) -> None:
    usage = ask(shared, "line-1", max_tokens=7, n=2, ignore_eos=True)["usage"]
    until(lambda: lines(shared, "line-1"), "the line of the request")
    (line,) = lines(shared, "line-1")
    assert (line["prompt_tokens"], line["output_tokens"], line["sequences"], line["finish"]) == (usage["prompt_tokens"], 14, 2, ["length"])
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["e2e_ms"]
    assert 0 < line["prefill_ms"] <= line["ttft_ms"]
    assert line["preemptions"] == 0 and line["stall_ms"] >= 0
    assert "Nobody" not in shared.log.read_text()


def test_a_client_that_leaves_is_in_the_log_too(shared: WorkerProcess) -> None:
    with shared.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True},
        headers={"X-Request-Id": "line-2"},
    ) as response:
        next(response.iter_lines())
    until(lambda: lines(shared, "line-2"), "the line of a request whose client left")
    (line,) = lines(shared, "line-2")
    assert line["finish"] == ["abort"] and line["ttft_ms"] is not None


def test_times_and_steps_are_in_the_metrics(shared: WorkerProcess) -> None:
    names = [f"fairlead_request_{part}_time_seconds_count" for part in ("queue", "prefill", "decode")]
    before = [shared.metric(name) for name in names]
    steps = shared.metric("fairlead_engine_steps_total")
    ask(shared, "line-3", max_tokens=5, ignore_eos=True)
    assert [shared.metric(name) for name in names] == [value + 1 for value in before]
    text = shared.client.get("/metrics").text
    counts = [float(value) for value in re.findall(r"^fairlead_step_seconds_count\{.*\} (\S+)$", text, re.M)]
    assert len(counts) == 3 and sum(counts) >= steps + 5
    assert shared.metric("fairlead_decode_stall_seconds_total") >= 0
    assert shared.metric("fairlead_preemption_recomputed_tokens_total") == 0


def test_a_traced_schedule_can_be_drawn(start: Callable[..., WorkerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace"
    worker = start("--trace-schedule", str(trace), "--chunked-prefill-size", "16").wait_ready()
    assert parse(worker.client.get("/internal/schedule").content.splitlines()).about["page_size"] > 0
    ask(worker, "traced", max_tokens=4, ignore_eos=True)
    assert worker.stop() == 0, "then the file is complete"
    assert len(parse(read_end(trace).splitlines()).steps) >= 5
    with pytest.raises(SystemExit) as left:
        main(["schedule", str(trace), "--width", "80"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert re.search(r"^r0 +▒+█···$", shown, re.M), shown
    assert "chunked_prefill_size 16" in shown
    assert "Nobody" not in trace.read_text()


def test_a_trace_that_cannot_be_written_is_named(model: Path) -> None:
    end = End()
    assert run(WorkerConfig(model=f"file://{model}", kv_pages=8, threads=1, trace_schedule="/nowhere/trace"), end) == 1
    assert end.reason == "--trace-schedule /nowhere/trace cannot be written: No such file or directory"


def test_the_process_is_in_the_metrics(shared: WorkerProcess) -> None:
    text = shared.client.get("/metrics").text
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"):
        assert re.search(rf"^{name} [0-9.e+]+$", text, re.M), name


def test_hits_of_each_tier_are_in_the_metrics() -> None:
    load = Load(prompt_tokens=100, cached_tokens=64, host=HostLoad(total=40, used=30, saved=50, loaded=3, dropped=20, cached_tokens=48))
    for seen, expected in ((load, (16, 48, 40, 30, 50, 3, 20)), (Load(cached_tokens=64), (64, 0, 0, 0, 0, 0, 0))):
        engine: Any = SimpleNamespace(state=SimpleNamespace(load=seen, start_up=StartUp(0.0), ready=None), serving=True)
        text = Metrics(engine, "m").render().decode()
        assert 'fairlead_prefix_cache_hits_total{model_name="m"} 64.0' in text, "both tiers"
        names = ("pages", "used_pages", "saved_pages_total", "loaded_pages_total", "dropped_pages_total")
        shown = [f'fairlead_prefix_cache_tier_hits_total{{model_name="m",tier="{tier}"}}' for tier in ("device", "host")]
        shown += [f'fairlead_host_kv_{name}{{model_name="m"}}' for name in names]
        for name, value in zip(shown, expected, strict=True):
            assert f"{name} {float(value)}\n" in text, name


def test_vllms_dashboards_find_their_names(flagged: WorkerProcess) -> None:
    both = ("generation_tokens_total", "request_generation_tokens_sum")
    names = [f"{prefix}{name}" for prefix in ("vllm:", "fairlead_") for name in both] + ["vllm:request_prompt_tokens_sum"]
    before = [flagged.metric(name) for name in names]
    usage = ask(flagged, "named", max_tokens=5, ignore_eos=True)["usage"]
    until(lambda: lines(flagged, "named"), "the end of the request")
    dashboard = {
        "e2e_request_latency_seconds_bucket",
        "prompt_tokens_total",
        "generation_tokens_total",
        "inter_token_latency_seconds_bucket",
        "time_per_output_token_seconds_bucket",
        "num_requests_running",
        "num_requests_waiting",
        "time_to_first_token_seconds_bucket",
        "kv_cache_usage_perc",
        "gpu_cache_usage_perc",
        "request_prompt_tokens_bucket",
        "request_generation_tokens_bucket",
        "request_success_total",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "prefix_cache_hits_total",
    }
    shown = set(re.findall(r'^vllm:(\w+)\{.*model_name="', flagged.client.get("/metrics").text, re.M))
    assert dashboard <= shown
    assert [flagged.metric(name) - value for name, value in zip(names, before, strict=True)] == [5, 5, 5, 5, usage["prompt_tokens"]]
