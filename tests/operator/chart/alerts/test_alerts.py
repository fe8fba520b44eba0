"""Each alert fires for what it names, when it says so, and for nothing else: promtool evaluates the chart's rules over generated series."""

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART
from tests.operator.support.monitoring import rule_groups

from .cases import CASES, Fires, Silent
from .series import MINUTES, STEP, Fleet, healthy_operator

ALERTS = [one["alert"] for one in yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())]
PAGE = CHART.parents[1] / "docs" / "operate" / "alerts.md"
TIMES = [index * STEP for index in range(int(MINUTES / STEP))]


def promtool(*arguments: str) -> None:
    program = apiserver.program("promtool")
    if program is None:
        pytest.skip("promtool not found: run `make kubernetes` once (root on Debian, Go 1.26; minutes)")
    done = subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def rules() -> dict[str, dict[str, Any]]:
    """Return the alerts of files/alerts.yaml; test_slo.py tests those of files/slo.yaml."""
    return {one["alert"]: one for one in rule_groups()[0]["rules"]}


@pytest.fixture(scope="module")
def rule_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "rules.yaml"
    path.write_text(json.dumps({"groups": [{"name": "fairlead", "rules": list(rules().values())}]}))
    return path


def expected(alert: str, labels: dict[str, str], value: str) -> dict[str, Any]:
    rule = rules()[alert]
    summary = rule["annotations"]["summary"].replace("{{ $value | humanizeDuration }}", value)
    summary = re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels[found[1]], summary)
    assert "{{" not in summary, "this test does not know the template"
    return {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": {**rule["annotations"], "summary": summary}}


def written(alert: str, case: Fires | Silent) -> dict[str, Any]:
    """Return the case as promtool's. Where an alert fires, a healthy service beside the faulty one has none."""
    calm = Fleet("calm").healthy() if isinstance(case, Fires) else {}
    series = {**calm, **Fleet().healthy(), **healthy_operator(), **case.series}
    begins = case.at if isinstance(case, Fires) else MINUTES
    checks = [(time, alert, []) for time in TIMES if time < begins]
    if isinstance(case, Fires):
        firing = {name: [expected(name, case.labels, case.value)] for name in (alert, *case.also)}
        checks += [(case.at, name, firing.get(name, [])) for name in ALERTS]
        if case.resolved is not None:
            checks.append((case.resolved, alert, []))
    return {
        "name": f"{alert}: {case.title}",
        "interval": f"{STEP * 60:.0f}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{time * 60:.0f}s", "alertname": name, "exp_alerts": alerts} for time, name, alerts in checks],
    }


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(json.dumps({"groups": rule_groups()}))
    promtool("check", "rules", "--lint=all", "--lint-fatal", str(path))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_exactly_for_what_it_names(alert: str, rule_file: Path) -> None:
    path = rule_file.parent / f"{alert}.yaml"
    tests = [written(alert, case) for case in CASES[alert]]
    path.write_text(json.dumps({"rule_files": [str(rule_file)], "evaluation_interval": f"{STEP * 60:.0f}s", "tests": tests}))
    promtool("test", "rules", str(path))


def test_each_alert_has_cases() -> None:
    assert list(CASES) == ALERTS
    for alert, cases in CASES.items():
        assert sum(isinstance(case, Fires) for case in cases) >= 1, f"{alert}: no series at which it fires"
        assert sum(isinstance(case, Silent) for case in cases) >= 3, f"{alert}: fewer than three near misses"
        assert len({case.title for case in cases}) == len(cases), alert
