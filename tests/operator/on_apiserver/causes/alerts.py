"""The alerts that Prometheus fires for the rows: promtool evaluates the chart's rules over the metrics scraped while all rows fail."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.operator.chart.alerts.test_alerts import promtool, rules

MINUTES = 40
"""Every alert of the chart fires within this time where its expression stays true."""
NAMESPACE = "fairlead-system"  # of the release


def check(folder: Path, expected: Mapping[str, Iterable[str]], operator: str, routers: Mapping[str, str]) -> None:
    """Check that each alert fires exactly for the namespaces in `expected` (by alert). `operator`, `routers`: metrics, as scraped."""
    series = dict(_series(operator, namespace=NAMESPACE, pod="operator-0"))
    for namespace, text in routers.items():
        series |= _series(text, namespace=namespace, service="qwen", pod="router-0")
    checks = []
    for alert, namespaces in expected.items():
        alerts = [_alert(alert, {"namespace": namespace, "service": "qwen"}) for namespace in namespaces]
        checks.append({"eval_time": f"{MINUTES}m", "alertname": alert, "exp_alerts": alerts})
    given = [{"series": name, "values": f"{value:g}x{2 * MINUTES}"} for name, value in series.items()]
    test = {"name": "causes", "interval": "30s", "input_series": given, "alert_rule_test": checks}
    (folder / "rules.yaml").write_text(json.dumps({"groups": [{"name": "fairlead", "rules": list(rules().values())}]}))
    (folder / "test.yaml").write_text(json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": [test]}))
    promtool("test", "rules", str(folder / "test.yaml"))


def _alert(alert: str, labels: dict[str, str]) -> dict[str, Any]:
    rule = rules()[alert]
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], rule["annotations"]["summary"])
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": {**rule["annotations"], "summary": summary}}


def _series(text: str, **labels: str) -> dict[str, float]:
    """Return the scraped samples by their series, with the labels that the chart's PodMonitors add."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("fairlead_") and family.type == "gauge":
                merged = {**labels, **sample.labels}
                name = sample.name + "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in sorted(merged.items())) + "}"
                found[name] = sample.value
    return found
