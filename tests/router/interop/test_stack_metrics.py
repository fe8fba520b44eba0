"""`--metrics-names vllm`: production-stack's metric names with this router's values."""

from prometheus_client.parser import text_string_to_metric_families
from tests.router.harness import Fleet

from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.interop.stack_metrics import WINDOW_SECONDS, StackMetrics
from fairlead_router.request.client_request import Call, Outcome, RequestHead

DASHBOARD = {
    "vllm:healthy_pods_total",
    "vllm:current_qps",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:avg_latency",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_incoming_requests_total",
    "vllm:input_tokens_total",
    "vllm:request_latency_seconds_bucket",
}


async def test_requests_are_counted_under_the_production_stacks_names(fleet: Fleet) -> None:
    workers = [await fleet.worker(load={"running": 3, "waiting": 2, "pages_free": 25, "pages_total": 100}) for _ in range(2)]
    router = await fleet.router(*workers, metrics_names="vllm", policy="RoundRobin")
    for _ in range(4):
        await router.complete("a prompt of some length, the same each time, so that it is cached")
    await router.client.post("/tokenize", json={"prompt": "x"})
    await router.client.post("/v1/completions", json={"model": "none"})
    text = (await router.client.get("/metrics")).text
    samples: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[sample.labels.get("server", "")] = sample.value
    assert samples.keys() >= DASHBOARD
    for worker in workers:
        server = f"http://{worker.address}"
        assert samples["vllm:num_requests_running"][server] == 3 and samples["vllm:num_requests_waiting"][server] == 2
        assert samples["vllm:gpu_cache_usage_perc"][server] == 0.75 and samples["vllm:healthy_pods_total"][server] == 1
        assert samples["vllm:current_qps"][server] == 2 / WINDOW_SECONDS
        assert samples["vllm:request_latency_seconds_count"][server] == 2
    assert sum(samples["vllm:num_incoming_requests_total"].values()) == 4
    assert "fairlead_router_requests_total" in samples and "fairlead_router_token_cache_bytes" in samples


async def test_by_default_only_our_own_names_are_exported(fleet: Fleet) -> None:
    router = await fleet.router(await fleet.worker())
    await router.complete()
    assert "vllm:" not in (await router.client.get("/metrics")).text


def test_metrics_over_the_last_minute_return_to_zero_after_it() -> None:
    now = 1000.0
    table = WorkerTable(lambda: now)
    table.set_addresses(["a:1"])
    stack = StackMetrics(table, lambda: "m", lambda: now)
    for took, cached in ((0.5, 64), (1.5, None)):
        head = RequestHead("POST", "/v1/completions", "id", [], started_at=now - took)
        call = Call(head, Outcome(worker="a:1", first_byte_at=now, prompt_tokens=128, cached_tokens=cached))
        stack.record(call)

    def value(name: str) -> float:
        return next(sample.value for metric in stack.collect() for sample in metric.samples if sample.name == name)

    assert value("vllm:current_qps") == 2 / WINDOW_SECONDS and value("vllm:avg_latency") == 1.0
    assert value("vllm:gpu_prefix_cache_hit_rate") == 0.5 and value("vllm:input_tokens_total") == 256
    now += WINDOW_SECONDS + 1
    assert value("vllm:current_qps") == value("vllm:avg_latency") == 0
    assert value("vllm:input_tokens_total") == 256
