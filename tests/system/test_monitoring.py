"""Every query of the chart's dashboards and rules returns data from a real Prometheus that scrapes real processes.

A router, two workers with engines (one is a canary), a batch server, Redis, and the operator on a real API server without nodes.
"""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import httpx
import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, install_crds
from tests.operator.support.monitoring import panel_queries, rule_groups, rules, selectors, variables
from tests.router.batch import deployment
from tests.router.gateway import gateway
from tests.router.tenancy.test_access import ANNA, bearer, key_file
from tests.servers.prometheus_server import PrometheusServer, prometheus
from tests.servers.redis_server import RedisServer, free_port
from tests.system.processes import NAMESPACE, Fleet, Process, engine_worker, until

from fairlead.random_model.build import make_model

pytestmark = pytest.mark.timeout(600)  # of which most is the start of two engines, an API server and an operator
CLASSES = [{"name": "chat", "ttftMilliseconds": 60_000, "itlMilliseconds": 60_000}]
SERVICE = {"namespace": "models", "service": "chat"}
WITHOUT_DATA = {
    "fairlead_router_recalls_total": "a worker resyncs after half an hour of wrong predictions",
    "fairlead_agent_kv_event_batches_replayed_total": "all workers run Fairlead's own engine",
    "fairlead_agent_kv_event_gaps_total": "all workers run Fairlead's own engine",
    "fairlead_engine_fallback": "the panel shows only workers that fell back",
    "fairlead_router_forwarded_requests_total": "the service has no other services at its endpoint",
}
"""Metrics that no healthy fleet has within a test, with the reason."""


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    folder = tmp_path_factory.mktemp("monitored")
    if problem := apiserver.missing():
        pytest.skip(problem)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(service(folder))
        targets = [*running.targets, *stack.enter_context(operator(folder))]
        server = stack.enter_context(prometheus(folder, scrape_configs(targets), rule_groups()))
        until(lambda: server.values("count(up == 1)") == [len(targets)], "all targets are scraped", 120)
        stop = Event()
        traffic = stack.enter_context(ThreadPoolExecutor(1)).submit(send_until, stop, running)
        stack.callback(stop.set)
        yield server
        stop.set()
        traffic.result()


class RunningService(NamedTuple):
    url: str
    picker_port: int
    targets: list[tuple[str, dict[str, str]]]


def scrape_configs(targets: list[tuple[str, dict[str, str]]]) -> list[dict[str, Any]]:
    """Return static targets with the labels that the chart's PodMonitors give them."""
    return [
        {
            "job_name": f"{labels['namespace']}/{labels['pod']}",
            "honor_labels": labels.get("component") is None,
            "static_configs": [{"targets": [address], "labels": labels}],
        }
        for address, labels in targets
    ]


@contextlib.contextmanager
def service(folder: Path) -> Iterator[RunningService]:
    """Run a service: Redis, two workers, a router that has failed a request, and a batch server."""
    model = make_model(folder / "tiny", "qwen3", vocab=1024, layers=1)
    (folder / "split.json").write_text(json.dumps({"revision": "rev-2", "weight": 50}))
    (folder / "secret").write_text(deployment.SECRET)
    (folder / "keys.yaml").write_text(key_file())
    batch_port = free_port()
    with RedisServer() as redis, contextlib.ExitStack() as stack:
        flags = ["--slo-classes", json.dumps(CLASSES), "--canary-file", str(folder / "split.json"), "--served-model-name", "tiny"]
        picker_port = free_port()
        flags += ["--api-keys-file", str(folder / "keys.yaml"), "--picker-port", str(picker_port), "--picker-tls", "off"]
        flags += ["--batch-url", f"http://127.0.0.1:{batch_port}", "--batch-secret-file", str(folder / "secret")]
        fleet = Fleet(folder, workers=0, routers=1, redis=redis.url, flags=flags, has_admin_ports=True)
        for pod, canary in (("pod-0", ""), ("pod-1", "rev-2")):
            settings = {"FAIRLEAD_REDIS_URL": redis.url, "FAIRLEAD_INDEX_NAMESPACE": NAMESPACE, "FAIRLEAD_CANARY": canary}
            worker = engine_worker(folder, model, pod, "--speculative-config", '{"method": "ngram"}', **settings)
            fleet.add_process(pod, *worker)
        stack.enter_context(fleet)
        (url,) = fleet.routers
        assert httpx.get(f"{url}/v1/batches", headers=bearer(ANNA), timeout=30).status_code >= 500, "the batch server does not run yet"
        batch = Process("batch", batch_command(folder, batch_port, url), folder / "batch.log")
        batch.start()
        stack.callback(batch.kill)
        until(lambda: answers(f"http://127.0.0.1:{batch_port}/ready"), "the batch server is ready")
        asyncio.run(ask_picker(picker_port))
        targets = [(address, SERVICE | {"component": "worker", "pod": pod}) for pod, address in fleet.pods.items()]
        targets += [(fleet.admin[url].removeprefix("http://"), SERVICE | {"component": "router", "pod": "router-0"})]
        targets += [(f"127.0.0.1:{batch_port}", SERVICE | {"component": "batch", "pod": "batch-0"})]
        yield RunningService(url, picker_port, targets)


def batch_command(folder: Path, port: int, router: str) -> list[str]:
    command = [sys.executable, "-m", "fairlead_router.batch.main", "--host", "127.0.0.1", "--port", str(port), "--router-url", router]
    return [*command, "--storage", f"file://{folder / 'storage'}", "--secret-file", str(folder / "secret")]


def send_requests(url: str) -> None:
    with httpx.Client(base_url=f"{url}/v1", timeout=60, headers=bearer(ANNA) | {"x-slo-class": "chat"}) as client:
        for number in range(8):  # conversations of both sides, whose prompts and answers repeat themselves
            text = f"number {number} " * 150
            body = {"model": "tiny", "max_tokens": 24, "ignore_eos": True, "temperature": 0}
            for stream in (True, False):
                answer = client.post("/completions", json=body | {"prompt": text, "stream": stream})
                assert answer.status_code == 200, answer.text
            answer = client.post("/chat/completions", json=body | {"messages": [{"role": "user", "content": text}]})
            assert answer.status_code == 200, answer.text
        assert client.post("/completions", json={"model": "other", "prompt": "x"}).status_code == 404


def send_until(stop: Event, running: RunningService) -> None:
    """Send requests again and again: a rate is the growth between two scrapes, and a starved target may miss some."""
    while not stop.wait(5):
        send_requests(running.url)
        asyncio.run(ask_picker(running.picker_port))


@contextlib.contextmanager
def operator(folder: Path) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Run the operator with a service whose pods are ready, and one whose status an admission policy denies."""
    with apiserver.start() as server:
        install_crds(server)
        for namespace in ("models", "denied"):
            server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        deny_status(server, "denied")
        command = [sys.executable, "-m", "fairlead_operator.main", "--worker-image=w:1", "--router-image=r:1", "--health-port=0"]
        command += [f"--kubeconfig={server.kubeconfig}", "--lease-namespace=models", "--redis-url=redis://r:6379"]
        process = Process("operator", command, folder / "operator.log")
        process.start()
        try:
            cluster = Cluster(server, "models")
            cluster.create()
            cluster.play_controllers()
            Cluster(server, "denied").create()
            until(lambda: "reconcile failed" in process.log, "the status of a service is denied", 60)
            port = re.search(r"health on port (\d+)", process.log)
            assert port is not None
            yield [(f"127.0.0.1:{port[1]}", {"namespace": "fairlead-system", "pod": "operator-0"})]
        finally:
            process.kill()


def deny_status(server: apiserver.ApiServer, namespace: str) -> None:
    """Deny writes of the status of services in a namespace, as an admission webhook with a fault does."""
    api = "/apis/admissionregistration.k8s.io/v1"
    rule = {"apiGroups": ["fairlead.dev"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["inferenceservices/status"]}
    policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": "false", "message": "denied"}]}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    binding = {"policyName": "deny-status", "validationActions": ["Deny"], "matchResources": here}
    for plural, kind, spec in (("ies", "y", policy), ("ybindings", "yBinding", binding)):
        body = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": f"ValidatingAdmissionPolic{kind}", "spec": spec}
        server.create(f"{api}/validatingadmissionpolic{plural}", body | {"metadata": {"name": "deny-status"}})


async def ask_picker(port: int) -> None:
    """Ask the endpoint picker as a gateway does."""
    async with gateway(port) as asking:
        exchange = asking.exchange()
        body = json.dumps({"model": "tiny", "prompt": "through a gateway"}).encode()
        await exchange.request("/v1/completions", body, authorization=f"Bearer {ANNA}")
        assert (await exchange.picked())[0]


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def has_reason(expression: str) -> bool:
    return any(metric in expression for metric in WITHOUT_DATA)


def test_every_query_of_every_panel_returns_data(monitored: PrometheusServer) -> None:
    waiting = [query for query in panel_queries() if not has_reason(query.expression)]
    assert len(waiting) > 100

    def all_have_data() -> bool:
        waiting[:] = [query for query in waiting if not monitored.values(query.expression)]
        return not waiting

    with contextlib.suppress(AssertionError):  # the assertion below names the queries
        until(all_have_data, "every query returns data", 60)
    assert [f"{query.where}: {query.expression}" for query in waiting] == []


def test_what_has_no_data_is_still_a_valid_query(monitored: PrometheusServer) -> None:
    queries = [query.expression for query in panel_queries() if has_reason(query.expression)]
    assert len(queries) == len(WITHOUT_DATA)
    assert [monitored.query(expression) for expression in queries] == [[]] * len(queries), "it has data: remove it from WITHOUT_DATA"


def test_every_variable_of_a_dashboard_offers_the_service(monitored: PrometheusServer) -> None:
    for where, label, selector in variables():
        assert monitored.label_values(label, selector) == [SERVICE[label]], where


def test_every_rule_is_evaluated_over_series_that_exist(monitored: PrometheusServer) -> None:
    """A selector that matches nothing is an alert that never fires: a wrong label, or a metric that no process exports."""
    expected = [rule.get("alert") or rule["record"] for kind in ("record", "alert") for rule in rules(kind)]
    until(lambda: all(rule["health"] == "ok" for rule in monitored.rules()), "all rules are evaluated", 60)
    assert sorted(rule["name"] for rule in monitored.rules()) == sorted(expected)
    for rule in (*rules("alert"), *rules("record")):
        for selector in selectors(rule["expr"]):
            where = f"{rule.get('alert') or rule['record']}: {selector.text}"
            until(lambda text=selector.text: monitored.series(text), f"a series of {where}", 240)
            assert any(selector.labels <= labels.keys() for labels in monitored.series(selector.text)), f"{where} lacks {selector.labels}"


def test_recording_rules_have_values(monitored: PrometheusServer) -> None:
    for name in {rule["record"] for rule in rules("record")}:
        until(lambda name=name: monitored.values(name), f"a value of {name}", 240)
    assert set(monitored.label_values("slo", "service:fairlead_slo_requests:rate5m")) == {"availability", "ttft", "itl"}


def test_the_alert_of_a_service_that_is_not_ready_is_pending(monitored: PrometheusServer) -> None:
    """The operator's requests to the router, which is no pod of the API server, fail."""
    labels = '{alertname="FairleadServiceNotReady", namespace="models", service="qwen"}'
    until(lambda: monitored.values(f"ALERTS{labels}") == [1], "the alert is pending", 30)
