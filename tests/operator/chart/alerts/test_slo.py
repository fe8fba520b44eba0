"""Burn-rate alerts of the objectives: when each fires and ends, over generated series of hours and days."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.operator.support.monitoring import rule_groups

from .series import name
from .test_alerts import promtool

HOUR, DAY = 60, 24 * 60
LABELS = {"namespace": "ml", "service": "chat", "pod": "r-1", "component": "router"}
BEGIN = 6 * HOUR  # minute at which the fault begins
Phases = list[tuple[float, int]]  # events a minute, minutes


@dataclass(frozen=True)
class Case:
    """A fault and its alerts. Cases of days are evaluated each 5 minutes, others each minute."""

    title: str
    series: dict[str, Phases]
    fires: dict[str, tuple[int, int]] = field(default_factory=dict)  # minutes between which each alert fires; others never do
    minutes: int = 9 * HOUR
    service_class: str = ""

    @property
    def step(self) -> int:
        """Minutes between two evaluations."""
        return 1 if self.minutes < DAY else 5


def requests(code: str, *phases: tuple[float, int]) -> dict[str, Phases]:
    return {name("fairlead_router_requests_total", **LABELS, path="/v1/chat/completions", code=code): list(phases)}


def broken(*phases: tuple[float, int]) -> dict[str, Phases]:
    return {name("fairlead_router_broken_streams_total", **LABELS): list(phases)}


def by_class(family: str, service_class: str, *phases: tuple[float, int], **labels: str) -> dict[str, Phases]:
    return {f"fairlead_router_slo_{name(family, **LABELS, **{'class': service_class}, **labels)}": list(phases)}


def failing(share: float, minutes: int, before: int = BEGIN, rate: float = 600) -> dict[str, Phases]:
    """A service whose requests fail with this share for so many minutes; then they succeed again."""
    return {
        **requests("200", (rate, before), (rate * (1 - share), minutes), (rate, 1)),
        **requests("503", (0, before), (rate * share, minutes), (0, 1)),
        **broken((0, 0)),
    }


def classes(missed_ttft: float = 0, rejected: float = 0, missed_itl: float = 0) -> dict[str, Phases]:
    """A service with class chat, which has both bounds, and batch, which has none: 60 requests a minute each, and faults of `chat`."""
    made = {**requests("200", (120, 0)), **broken((0, 0))}
    for service_class in ("chat", "batch"):
        made |= by_class("requests_total", service_class, (60, 0))
        made |= by_class("rejected_total", service_class, (0, BEGIN), (60 * rejected if service_class == "chat" else 0, 0))
    for bound, share in (("ttft", missed_ttft), ("itl", missed_itl)):
        made |= by_class("missed_requests_total", "chat", (0, BEGIN), (60 * share, 0), bound=bound)
    return made


END = 10**6  # later than any test
FAST, SLOW = "FairleadAvailabilityBurn", "FairleadAvailabilityBurnSlow"


def burning(alert: str) -> dict[str, tuple[int, int]]:
    """Return when the alerts of a class fire of which a fifth misses a bound."""
    return {alert: (408, END), f"{alert}Slow": (396, END)}


CASES = [
    Case("all requests fail", failing(1, 20), {FAST: (365, 413), SLOW: (377, END)}),
    Case("2 % fail: 14.4 times the budget's pace within the hour", failing(0.02, 2 * HOUR), {FAST: (408, 503), SLOW: (396, END)}),
    Case(
        "a twentieth of the answers is truncated",
        {**requests("200", (600, 0)), **broken((0, BEGIN), (30, 0))},
        {FAST: (382, END), SLOW: (385, END)},
    ),
    Case("1 % fails for 20 minutes", failing(0.01, 20)),
    Case("a quarter of the requests fails for a minute", failing(0.25, 1)),
    Case("a tenth is refused with 429", {**requests("200", (540, 0)), **requests("429", (0, BEGIN), (60, 0)), **broken((0, 0))}),
    Case("4 of 20 requests fail", failing(0.2, 3 * HOUR, rate=0.11)),
    Case("few requests, and all fail", failing(1, 3 * HOUR, rate=0.1), {FAST: (404, END), SLOW: (417, END)}),
    Case("no requests", {**requests("200", (0, 0)), **requests("503", (0, 0)), **broken((0, 0))}),
    Case("0.8 % fail: 6 times the pace within 6 hours", failing(0.008, DAY), {FAST: (634, END), SLOW: (429, END)}, minutes=12 * HOUR),
    Case("0.4 % fail for a day", failing(0.004, 2 * DAY, before=3 * DAY), {SLOW: (5420, END)}, minutes=4 * DAY),
    Case("0.15 % fail for days", failing(0.0015, 3 * DAY, before=DAY), {SLOW: (4340, END)}, minutes=4 * DAY),
    Case("0.4 % fail for 12 hours", failing(0.004, 12 * HOUR, before=3 * DAY), minutes=4 * DAY),
    Case("0.05 % fail", failing(0.0005, 3 * DAY), minutes=2 * DAY),
    Case("a fifth of a class begins late", classes(missed_ttft=0.2), burning("FairleadTtftBurn"), service_class="chat"),
    Case("a fifth of a class is rejected", classes(rejected=0.2), burning("FairleadTtftBurn"), service_class="chat"),
    Case("a fifth of a class streams slowly", classes(missed_itl=0.2), burning("FairleadItlBurn"), service_class="chat"),
    Case("0.7 % of a class misses each bound", classes(0.002, 0.005, 0.007)),
]


def samples(phases: Phases, minutes: int) -> str:
    """Return the counter of these phases in promtool's notation; the last phase lasts to the end."""
    words, value, left = [], 0.0, minutes + 1
    for number, (rate, length) in enumerate(phases):
        count = left if number == len(phases) - 1 else min(length, left)
        if count < 1:
            break
        words.append(f"{value:.6f}+{rate:.6f}x{count - 1}")
        value, left = value + rate * count, left - count
    return " ".join(words)


@pytest.fixture(scope="module")
def rule_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (group,) = (each for each in rule_groups() if each["name"].endswith("-slo"))
    assert group["interval"] == "1m", "the alerts count bad requests as sums of a rate each minute"
    path = tmp_path_factory.mktemp("slo") / "rules.yaml"
    path.write_text(json.dumps({"groups": [group]}))
    return path


def firing_at(case: Case, minute: float) -> list[dict[str, object]]:
    """Return what promtool is to find at a minute: one series for each alert that fires. The service has the case's title for a name."""
    labels = {"namespace": "ml", "service": case.title} | ({"class": case.service_class} if case.service_class else {})
    fires = [alert for alert, (begin, end) in case.fires.items() if begin <= minute < end]
    return [{"labels": name("", alertname=alert, **labels), "value": 1} for alert in fires]


@pytest.mark.parametrize("length", sorted({case.minutes for case in CASES}))
def test_a_burning_budget_fires_its_alert_and_no_other(length: int, rule_file: Path) -> None:
    """All cases of one length together: Prometheus computes most of the time, and not for longer with more services."""
    cases = [case for case in CASES if case.minutes == length]
    step = cases[0].step
    edges = {minute + late for case in cases for fires in case.fires.values() for minute in fires for late in (-step, 0) if minute < END}
    minutes = sorted({*range(0, length, 10 if length < DAY else 2 * HOUR), *edges, length})
    query = 'count by (alertname, namespace, service, class) (ALERTS{alertstate="firing"})'
    checks = [
        {"expr": query, "eval_time": f"{minute}m", "exp_samples": [one for case in cases for one in firing_at(case, minute)]}
        for minute in minutes
    ]
    series = [
        {"series": each.replace('service="chat"', f'service="{case.title}"'), "values": samples(phases, length)}
        for case in cases
        for each, phases in case.series.items()
    ]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    path = rule_file.parent / "test.yaml"
    path.write_text(json.dumps({"rule_files": [str(rule_file)], "evaluation_interval": f"{step}m", "tests": [test]}))
    promtool("test", "rules", str(path))
