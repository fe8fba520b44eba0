"""Dashboards and alerts use metrics that the processes export, and each alert has its page in the runbooks."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.generate.reference import registries
from tests.operator.support.chart import CHART, template
from tests.operator.support.monitoring import ON, dashboards, panel_queries, panels, rules, selectors, variables

ROOT = Path(__file__).parents[3]
NOT_SHOWN = {"process_virtual_memory_bytes", "process_start_time_seconds", "process_open_fds", "process_max_fds"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> set[str]:
    families = [family for _, registry in registries() for family in registry.collect()]
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def queries() -> Iterator[tuple[str, str]]:
    """Yield (where, expression) of all dashboards and rules."""
    yield from panel_queries()
    yield from ((where, selector) for where, _, selector in variables())
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for kind in ("alert", "record") for rule in rules(kind))


def metrics_in(expression: str) -> set[str]:
    return {selector.text.partition("{")[0] for selector in selectors(expression)}


def test_every_query_is_promql_over_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    names, asked = exported() | recorded, list(queries())
    assert len(asked) > 100 and len(names) > 60
    for where, expression in asked:
        found = metrics_in(expression)
        assert found or expression.startswith("vector("), where
        assert found <= names, f"{where}: {found - names} is exported by no process"


def test_every_metric_and_recorded_series_is_on_a_dashboard_or_in_a_rule() -> None:
    used = {name for _, expression in queries() for name in metrics_in(expression)}
    unused = {name for name in exported() if not name.endswith(("_sum", "_count", "_created"))} - used - NOT_SHOWN
    assert not unused, "add a panel to charts/fairlead/files/dashboards.yaml"
    assert {rule["record"] for rule in rules("record")} <= used


def test_service_engine_index_and_operator_have_a_dashboard() -> None:
    made = dashboards()
    assert set(made) == {f"fairlead-{name}.json" for name in ("service", "engine", "index", "operator")}
    for name, dashboard in made.items():
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 8, name
        assert dashboard["uid"] == name.removesuffix(".json")
        cells = [cell for panel in dashboard["panels"] for cell in covered(panel["gridPos"])]
        assert len(set(cells)) == len(cells), f"{name}: two panels lie on each other"
        assert {x for x, _ in cells} == set(range(24))
        for panel in panels(dashboard):
            assert panel["targets"] and all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_grafanas_own_models_know_every_field_of_the_dashboards() -> None:
    """Grafana's SDK, which is generated from its schemas, drops fields that they lack. No Grafana runs: it has no package."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="run `make install`")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()  # it knows the queries of Prometheus
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    for name, dashboard in dashboards().items():
        known = json.loads(json.dumps(models.Dashboard.from_json(dashboard), cls=encoder))
        assert not list(unknown_fields(dashboard, known, name))
    with_typo = {
        "title": "x",
        "panels": [{"type": "timeseries", "tagets": [], "fieldConfig": {"defaults": {"unitt": "s"}, "overrides": []}}],
    }
    known = json.loads(json.dumps(models.Dashboard.from_json(with_typo), cls=encoder))
    assert list(unknown_fields(with_typo, known, "")) == [".panels.0.tagets", ".panels.0.fieldConfig.defaults.unitt"]


def unknown_fields(made: Any, known: Any, path: str) -> Iterator[str]:
    """Yield the paths whose value is another one, or absent, in `known`."""
    if isinstance(made, dict) and isinstance(known, dict):
        for key, value in made.items():
            yield from unknown_fields(value, known.get(key), f"{path}.{key}")
    elif isinstance(made, list) and isinstance(known, list) and len(made) == len(known):
        for number, (value, other) in enumerate(zip(made, known, strict=True)):
            yield from unknown_fields(value, other, f"{path}.{number}")
    elif made != known:
        yield path


def covered(place: dict[str, int]) -> list[tuple[int, int]]:
    """Return the cells of Grafana's grid that a panel covers."""
    return [(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])]


def test_every_alert_links_to_its_own_heading_in_the_runbooks() -> None:
    page = (ROOT / "docs" / "operate" / "alerts.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.+?)(?=^## |\Z)", page, re.M | re.S))
    for alert in rules("alert"):
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
    plain = {one["alert"] for one in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())}
    slo = yaml.safe_load((CHART / "files" / "slo.yaml").read_text())
    burning = {indicator["alert"] + speed["suffix"] for indicator in slo["indicators"] for speed in slo["alerts"]}
    assert plain | burning == {one["alert"] for one in rules("alert")} and len(burning) == 6
