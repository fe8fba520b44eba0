"""`kubectl fairlead status | top | explain`; `fairlead` has the same commands."""

import argparse
import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.kube import table, top
from fairlead.kube.api import Kube
from fairlead.kube.explain import Report, explain
from fairlead.kube.facts import read_facts
from fairlead.kube.sections import Line
from fairlead.kube.snapshot import ServiceRow, read

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: " "}


def add_cluster(parser: argparse.ArgumentParser, *, everywhere: bool = True) -> None:
    """Add kubectl's flags for the cluster and the namespace."""
    parser.add_argument("-n", "--namespace", metavar="NS", default="", help="namespace (default: that of the context)")
    if everywhere:
        parser.add_argument("-A", "--all-namespaces", action="store_true", help="all namespaces")
    parser.add_argument("--context", metavar="C", default="", help="context of the kubeconfig (default: the current one)")
    parser.add_argument("--kubeconfig", metavar="FILE", default="", help="kubeconfig file (default: $KUBECONFIG, then ~/.kube/config)")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="json: for scripts")


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="one service (default: all of the namespace)")
    add_cluster(parser)
    parser.add_argument("--no-pods", action="store_true", help="show services without their pods")
    parser.add_argument("--no-live", action="store_true", help="do not read from the routers (reading needs the verb get on pods/proxy)")


def add_top_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("top", help="live load of services and pods in a cluster")
    parser.add_argument("name", nargs="?", default="", help="one service (default: all of the namespace)")
    add_cluster(parser)
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two refreshes (default 2)")
    parser.add_argument("--no-pods", action="store_true", help="show services without their pods")
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.set_defaults(run=run_top)


def add_explain_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="why a service is not ready, and what to do next; exit status 1 if not ready")
    parser.add_argument("name", help="the InferenceService")
    add_cluster(parser, everywhere=False)
    parser.set_defaults(run=run_explain)


def names_cluster(arguments: argparse.Namespace) -> bool:
    """Return whether the command line selects a cluster."""
    return bool(arguments.name or arguments.namespace or arguments.all_namespaces or arguments.context or arguments.kubeconfig)


def has_kubeconfig() -> bool:
    """Return whether there is a kubeconfig, or this is a pod with a service account."""
    given = os.environ.get("KUBECONFIG", "")
    return bool(given or os.environ.get("KUBERNETES_SERVICE_HOST")) or (Path.home() / ".kube" / "config").exists()


def run_status(arguments: argparse.Namespace) -> int:
    """Print the services. Return 0 if every service is ready, 1 if one is not or there is none."""
    kube, namespace = _where(arguments)
    rows = read(kube, namespace, arguments.name, live=not arguments.no_live)
    if arguments.output == "json":
        _print_json([row.as_json() for row in rows])
    else:
        console = make_console()
        if rows:
            console.print(table.build_table(rows, namespaces=not namespace, pods=not arguments.no_pods))
            table.print_messages(console, rows)
        else:
            console.print(
                f"no InferenceServices{f' in namespace {namespace}' if namespace else ''}. examples/ has manifests to start with."
            )
    return 0 if rows and all(row.ready for row in rows) else 1


def run_top(arguments: argparse.Namespace) -> int:
    kube, namespace = _where(arguments)

    def read_rows() -> list[ServiceRow]:
        return read(kube, namespace, arguments.name)

    if arguments.output == "json":
        rows, problem = next(top.frames(read_rows, arguments.interval))
        if problem:
            raise UserError(problem)
        _print_json([row.as_json() for row in rows])
        return 0
    return top.run(
        make_console(), read_rows, interval=arguments.interval, once=arguments.once, namespaces=not namespace, pods=not arguments.no_pods
    )


def run_explain(arguments: argparse.Namespace) -> int:
    """Print the report. Return 0 if the service is ready, else 1."""
    kube = Kube.connect(arguments.kubeconfig, arguments.context)
    report = explain(read_facts(kube, arguments.namespace or kube.namespace, arguments.name), datetime.now(UTC))
    if arguments.output == "json":
        _print_json(report.as_json())
    else:
        print_report(make_console(), report)
    return 0 if report.ready else 1


def print_report(console: Console, report: Report) -> None:
    console.print(f"[bold {'green' if report.ready else 'red'}]{escape(report.headline)}[/]", soft_wrap=True)
    for title, lines in report.sections.items():
        if lines:
            console.print(f"\n[bold]{title}[/]")
            _print_lines(console, lines)
    console.print("\n[bold]what to do next[/]")
    for number, one in enumerate(report.next, 1):
        console.print(f"  {number}. {escape(one)}", soft_wrap=True)


def _print_lines(console: Console, lines: Sequence[Line]) -> None:
    for line in lines:
        console.print(f"  {_MARKS[line.ok]} {escape(line.text)}", soft_wrap=True)


def _where(arguments: argparse.Namespace) -> tuple[Kube, str]:
    """Return the cluster and the namespace; empty: all namespaces."""
    if arguments.name and arguments.all_namespaces:
        raise UserError(f"{arguments.name} and -A: a service belongs to one namespace; give -n NAMESPACE instead of -A")
    kube = Kube.connect(arguments.kubeconfig, arguments.context)
    return kube, "" if arguments.all_namespaces else arguments.namespace or kube.namespace


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: between 0.1 and 3600 seconds")
    return value
