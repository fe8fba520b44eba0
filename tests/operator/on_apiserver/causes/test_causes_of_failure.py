"""Each cause of failure, produced on a real API server: its condition, Event, alert and runbook, and the next step that `explain` names."""

from pathlib import Path

import pytest
from tests.operator.chart.alerts.test_alerts import ALERTS, PAGE
from tests.operator.support import controllers

from . import alerts, environment
from .refused import REFUSED
from .table import ROWS

NAMES = {f"cause-{number}": row for number, row in enumerate(ROWS)}
LONGEST_FIRST = sorted(NAMES.items(), key=lambda item: "rollout" not in item[1].spec)  # with a deadline of 30 s


@pytest.mark.timeout(900)
def test_each_cause_is_reported_with_its_alert_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """All rows together: API server, controllers and operator serve them at the same time, and one run of promtool has all alerts."""
    if problem := controllers.missing():
        pytest.skip(problem)
    with environment.start(tmp_path, monkeypatch) as running:
        found = running.produce([item for item in LONGEST_FIRST if not item[1].without_controllers])
        running.stop_controllers()
        found |= running.produce([item for item in LONGEST_FIRST if item[1].without_controllers])
        operator, routers = running.scrape(), running.scrape_routers()
        refusals = {row.cause: running.refusal(row.spec) for row in REFUSED}
    for name, report in found.items():
        with subtests.test(NAMES[name].cause):
            if isinstance(report, Exception):
                raise report
            told = " ".join(" ".join(report.next).split())
            assert NAMES[name].next_step in told, f"explain says: {told}"
    for refused in REFUSED:
        with subtests.test(refused.cause):
            assert refused.answer in refusals[refused.cause]
    expected = {alert: [name for name, row in NAMES.items() if alert in row.alerts] for alert in ALERTS}
    alerts.check(tmp_path, expected, operator, routers)


def test_each_reason_is_on_a_page_of_reasons() -> None:
    page = "".join((PAGE.parent / name).read_text() for name in ("conditions.md", "troubleshoot/pods.md"))
    assert {row.reason for row in ROWS if f"`{row.reason}`" not in page} == set()


def test_the_table_has_at_least_40_causes() -> None:
    assert len({row.cause for row in ROWS}) == len(ROWS) >= 40
