"""A real Prometheus scrapes the cluster as the chart's PodMonitors say, and the queries of dashboards and rules return data.

`tests/system/test_monitoring.py` has the features that this service does not use.
"""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.operator.support.monitoring import panel_queries, rule_groups, rules, selectors, variables
from tests.servers.pod_monitors import scrape_config
from tests.servers.prometheus_server import PrometheusServer, prometheus

from e2e.service import Load, Service
from e2e.system import CHECKOUT, System, eventually

pytestmark = pytest.mark.long

UNUSED = (
    "fairlead_batch_",  # spec.batch
    "fairlead_router_side_",  # a canary
    "fairlead_router_canary_weight",
    "fairlead_router_picks_total",  # a gateway
    "fairlead_router_tenant_tokens_total",  # tenants
    "fairlead_router_recalls_total",  # sustained wrong predictions
    "fairlead_router_forwarded_requests_total",  # other services at its endpoint
    "fairlead_spec_decode_",  # speculative decoding
    "fairlead_operator_reconcile_errors_total",  # a failed reconcile
)
"""Metrics of what this service does not use, and of failures that it does not have."""


@pytest.fixture(scope="module")
def service(installed: System) -> Iterator[Service]:
    service = Service(installed, "watched")
    classes = [{"name": "chat", "ttftMilliseconds": 60_000, "itlMilliseconds": 60_000}]
    manifest = service.manifest(replicas=2, routing={"replicas": 1}, slo={"defaultClass": "chat", "classes": classes})
    with service.running(manifest, replicas=2):
        yield service


@pytest.fixture(scope="module")
def monitored(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Prometheus beside the cluster. It reaches pods through the API server, which every cluster allows, and runs under load."""
    system, folder = service.system, tmp_path_factory.mktemp("prometheus")
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(system.cluster.kubectl("config", "view", "--raw", "--minify", "-o", "json").stdout)
    configs = [scrape_config(monitor, kubeconfig, proxied=True) for monitor in pod_monitors(system)]
    with system.cluster.network(), prometheus(folder, configs, rule_groups()) as server, Load(service):
        eventually(lambda: len(server.values("up == 1")) == 4, 120, "operator, router and two workers are scraped")
        service.chat("Why is the sky blue? " * 100)  # the token cache counts long prompts only
        yield server
    shutil.rmtree(folder)  # it has the credentials


def pod_monitors(system: System) -> list[dict[str, Any]]:
    """Return the PodMonitors of the installed release: the cluster lacks their CRD, so that the installation left them out."""
    arguments = ["template", "fairlead", str(CHECKOUT / "charts" / "fairlead"), "-n", system.namespace]
    arguments += ["--api-versions=monitoring.coreos.com/v1/PodMonitor", "--set=monitoring.podMonitors=true"]
    documents = yaml.safe_load_all(system.cluster.helm(*arguments).stdout)
    return [document for document in documents if document and document["kind"] == "PodMonitor"]


def test_every_query_of_what_the_service_uses_returns_data(monitored: PrometheusServer) -> None:
    waiting = [query for query in panel_queries() if not any(metric in query.expression for metric in UNUSED)]
    assert len(waiting) > 80

    def all_have_data() -> bool:
        waiting[:] = [query for query in waiting if not monitored.values(query.expression)]
        return not waiting

    with contextlib.suppress(AssertionError):  # the assertion below names the queries
        eventually(all_have_data, 120, "data")
    assert [f"{query.where}: {query.expression}" for query in waiting] == []


def test_series_have_the_labels_of_pods_and_services(monitored: PrometheusServer) -> None:
    for where, label, selector in variables():
        expected = {"namespace": "models", "service": "watched"}[label]
        assert expected in monitored.label_values(label, selector), where
    (router,) = {labels["pod"] for labels in monitored.series('fairlead_router_index_up{service="watched", component="router"}')}
    assert router.startswith("watched-router-")


def test_rules_are_evaluated_over_series_that_exist(monitored: PrometheusServer) -> None:
    eventually(lambda: all(rule["health"] == "ok" for rule in monitored.rules()), 60, "all rules are evaluated")
    for rule in (*rules("alert"), *rules("record")):
        for selector in selectors(rule["expr"]):
            if "reconcile_errors" in selector.text or 'code=~"5.."' in selector.text:
                continue  # nothing fails here
            name = rule.get("alert") or rule["record"]
            eventually(lambda text=selector.text: monitored.series(text), 60, f"a series of {name}: {selector.text}")
            assert any(selector.labels <= labels.keys() for labels in monitored.series(selector.text)), f"{name}: {selector}"


def test_a_healthy_service_has_no_alert(monitored: PrometheusServer) -> None:
    firing = monitored.query('ALERTS{service="watched"}')
    assert [sample["metric"]["alertname"] for sample in firing] == []
