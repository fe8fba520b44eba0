"""What the chart gives to Prometheus and Grafana, and the series that its queries need."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import promql_parser
from tests.operator.support.chart import PROMETHEUS, template

ON = (*PROMETHEUS, "--set=monitoring.podMonitors=true", "--set=monitoring.rules=true", "--set=monitoring.dashboards=true")
RATE_INTERVAL = "5m"
LABEL_VALUES = re.compile(r"label_values\((?P<selector>.*), (?P<label>\w+)\)")


class Query(NamedTuple):
    where: str  # dashboard and panel
    expression: str  # as Grafana sends it when all namespaces and services are chosen


class Selector(NamedTuple):
    text: str
    labels: frozenset[str]  # that the query groups or joins by


@cache
def objects() -> list[dict[str, Any]]:
    return template(*ON)


def dashboards() -> dict[str, dict[str, Any]]:
    maps = [one["data"] for one in objects() if one["kind"] == "ConfigMap" and "dashboard" in one["metadata"]["name"]]
    return {name: json.loads(text) for data in maps for name, text in data.items()}


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that have queries, not the rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[Query]:
    """Yield the queries of all panels."""
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
                yield Query(f"{name}: {panel['title']}: {target['legendFormat']}", re.sub(r"\$(namespace|service)", ".*", expression))


def variables() -> Iterator[tuple[str, str, str]]:
    """Yield where a variable is, the label whose values it offers, and the selector of the series that have it."""
    for name, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                found = LABEL_VALUES.fullmatch(variable["query"])
                assert found, variable
                yield f"{name}: {variable['name']}", found["label"], found["selector"].replace("$namespace", ".*")


def rule_groups() -> list[dict[str, Any]]:
    (rule,) = [one for one in objects() if one["kind"] == "PrometheusRule"]
    return list(rule["spec"]["groups"])


def rules(kind: str) -> list[dict[str, Any]]:
    """Return all rules of a kind: `alert` or `record`."""
    return [rule for group in rule_groups() for rule in group["rules"] if kind in rule]


def selectors(expression: str) -> set[Selector]:
    """Return the series that an expression reads, each with the labels by which the expression groups them."""
    return set(_selectors(promql_parser.parse(expression), frozenset()))


def _selectors(node: Any, labels: frozenset[str]) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        yield Selector(str(node), labels)
    elif isinstance(node, promql_parser.MatrixSelector):
        yield from _selectors(node.vector_selector, labels)
    elif isinstance(node, promql_parser.AggregateExpr):
        yield from _selectors(node.expr, frozenset(node.modifier.labels if node.modifier else ()) - {"le"})
    elif isinstance(node, promql_parser.BinaryExpr):
        yield from _selectors(node.lhs, labels)
        yield from _selectors(node.rhs, labels)
    elif isinstance(node, promql_parser.Call):
        for argument in node.args if node.func.name != "absent" else ():  # it is true without series
            yield from _selectors(argument, labels)
    elif isinstance(node, promql_parser.ParenExpr | promql_parser.UnaryExpr):
        yield from _selectors(node.expr, labels)
    elif not isinstance(node, promql_parser.NumberLiteral | promql_parser.StringLiteral):
        raise TypeError(f"this test does not know {type(node).__name__}")
