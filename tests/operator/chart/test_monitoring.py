"""Dashboards and alerts use metrics that the processes export, and each alert has its page in the runbooks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from docs.generate.reference import registries
from tests.operator.support.chart import CHART, PROMETHEUS, template

ROOT = Path(__file__).parents[3]
ON = (*PROMETHEUS, "--set=monitoring.podMonitors=true", "--set=monitoring.rules=true", "--set=monitoring.dashboards=true")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> set[str]:
    families = [family for _, registry in registries() for family in registry.collect()]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def dashboards() -> dict[str, Any]:
    maps = [one["data"] for one in template(*ON) if one["kind"] == "ConfigMap" and "dashboard" in one["metadata"]["name"]]
    return {name: json.loads(text) for data in maps for name, text in data.items()}


def queries() -> Iterator[tuple[str, str]]:
    """(where, expression) of all dashboards and alerts."""
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                yield f"{name}: {panel['title']}", target["expr"].replace("$__rate_interval", "5m")
        for variable in dashboard["templating"]["list"][1:]:
            yield f"{name}: {variable['name']}", re.sub(r"label_values\((.*), \w+\)", r"\1", variable["query"])
    for alert in alerts():
        yield alert["alert"], alert["expr"]


def alerts() -> list[dict[str, Any]]:
    (rule,) = [one for one in template(*ON) if one["kind"] == "PrometheusRule"]
    return list(rule["spec"]["groups"][0]["rules"])


def test_every_query_is_promql_over_metrics_that_exist() -> None:
    names, asked = exported(), list(queries())
    assert len(asked) > 50 and len(names) > 60
    for where, expression in asked:
        promql_parser.parse(expression)
        found = set(re.findall(r"\bfairlead_\w+", expression))
        assert found and found <= names, f"{where}: {found - names} is exported by no process"


def test_each_kind_of_process_has_its_dashboard() -> None:
    made = dashboards()
    assert set(made) == {f"fairlead-{name}.json" for name in ("workers", "router", "index", "operator")}
    for name, dashboard in made.items():
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 6, name
        assert len({json.dumps(panel["gridPos"]) for panel in dashboard["panels"]}) == len(dashboard["panels"]), "panels lie side by side"
        assert dashboard["uid"] == name.removesuffix(".json")


def test_every_alert_links_to_its_own_heading_in_the_runbooks() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.+?)(?=^## |\Z)", page, re.M | re.S))
    for alert in alerts():
        assert alert["annotations"]["runbook_url"].endswith(f"/docs/operate/alerts.md#{alert['alert'].lower()}")
        assert len(sections.pop(alert["alert"], "")) > 100, f"docs/operate/alerts.md does not say what to do about {alert['alert']}"
    assert not sections, "runbooks of alerts that do not exist"


def test_monitoring_objects_are_left_out_by_default_and_without_their_crds() -> None:
    kinds = {"PodMonitor", "PrometheusRule"}
    assert not [one for one in template() if one["kind"] in kinds or "dashboard" in one["metadata"]["name"]]
    assert not [one for one in template(*ON[2:]) if one["kind"] in kinds], "their CRDs are not in the cluster"
    assert {one["kind"] for one in template(*ON)} >= kinds


@pytest.mark.parametrize("watched", ["", "ml"])
def test_pods_are_found_by_the_labels_and_ports_that_they_have(watched: str) -> None:
    watch = [f"--set=watch.namespaces[0]={watched}"] if watched else []
    made = template(*ON, *watch, "--set=monitoring.labels.release=prometheus")
    monitors = {one["metadata"]["name"]: one for one in made if one["kind"] == "PodMonitor"}
    assert all(one["metadata"]["labels"]["release"] == "prometheus" for one in monitors.values())
    services = monitors["fl-fairlead-services"]["spec"]
    assert services["namespaceSelector"] == ({"matchNames": ["ml"]} if watched else {"any": True})
    assert services["selector"] == {"matchLabels": {"app.kubernetes.io/managed-by": "fairlead"}}
    (pod,) = [one["spec"]["template"] for one in made if one["kind"] == "Deployment" and one["metadata"]["name"] == "fl-fairlead-operator"]
    (endpoint,) = monitors["fl-fairlead-operator"]["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in pod["spec"]["containers"][0]["ports"]} and endpoint["honorLabels"]


def test_the_files_of_the_chart_are_what_the_page_says() -> None:
    assert {one["alert"] for one in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())} == {one["alert"] for one in alerts()}
