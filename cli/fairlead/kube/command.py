"""`kubectl fairlead status | top | explain`; `fairlead` has the same commands."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
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
from fairlead.options import AllNamespaces, Context, Kubeconfig, Namespace, Output, print_data

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: " "}


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """A service, and where it is; the options of a cluster have kubectl's names."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The InferenceService.")] = ""
    namespace: Namespace = ""
    context: Context = ""
    kubeconfig: Kubeconfig = ""


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(ServiceOptions):
    """The options of `explain`."""

    output: Output = "table"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(ExplainOptions):
    """The options that `status` and `top` share."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="One service (default: all of the namespace).")] = ""
    all_namespaces: AllNamespaces = False
    no_pods: Annotated[bool, typer.Option("--no-pods", help="Show services without their pods.")] = False


@dataclass(frozen=True, kw_only=True)
class StatusOptions(ClusterOptions):
    """The options of `status`."""

    no_live: Annotated[bool, typer.Option("--no-live", help="Do not read from the routers (reading needs the verb get on pods/proxy).")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class TopOptions(ClusterOptions):
    """The options of `top`."""

    interval: Annotated[float, typer.Option(metavar="S", min=0.1, max=3600, help="Seconds between two refreshes.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False


def names_cluster(options: ServiceOptions) -> bool:
    """Return whether the command line selects a cluster."""
    everywhere = getattr(options, "all_namespaces", False)
    return bool(options.namespace or everywhere or options.context or options.kubeconfig)


def has_kubeconfig() -> bool:
    """Return whether there is a kubeconfig, or this is a pod with a service account."""
    given = os.environ.get("KUBECONFIG", "")
    return bool(given or os.environ.get("KUBERNETES_SERVICE_HOST")) or (Path.home() / ".kube" / "config").exists()


def run_status(options: StatusOptions) -> int:
    """Print the services. Return 0 if every service is ready, 1 if one is not or there is none."""
    kube, namespace = _where(options)
    rows = read(kube, namespace, options.name, live=not options.no_live)
    if options.output != "table":
        print_data([row.as_json() for row in rows], options.output)
    else:
        console = make_console()
        if rows:
            console.print(table.build_table(rows, namespaces=not namespace, pods=not options.no_pods, width=console.width))
            table.print_messages(console, rows)
        else:
            console.print(
                f"no InferenceServices{f' in namespace {namespace}' if namespace else ''}. examples/ has manifests to start with."
            )
    return 0 if rows and all(row.ready for row in rows) else 1


def run_top(options: TopOptions) -> int:
    kube, namespace = _where(options)

    def read_rows() -> list[ServiceRow]:
        return read(kube, namespace, options.name)

    return show_top(options, read_rows, namespaces=not namespace)


def show_top(options: TopOptions, read_rows: top.ReadRows, namespaces: bool) -> int:
    """Show the live table, or print its rows as data."""
    if options.output == "table":
        return top.run(
            make_console(), read_rows, interval=options.interval, once=options.once, namespaces=namespaces, pods=not options.no_pods
        )
    rows, problem = next(top.frames(read_rows, options.interval))
    if problem:
        raise UserError(problem)
    print_data([row.as_json() for row in rows], options.output)
    return 0


def run_explain(options: ExplainOptions) -> int:
    """Print the report. Return 0 if the service is ready, else 1."""
    if not options.name:
        raise UserError("no service: give its NAME; `kubectl fairlead status -A` lists them")
    kube = Kube.connect(options.kubeconfig, options.context)
    report = explain(read_facts(kube, options.namespace or kube.namespace, options.name), datetime.now(UTC))
    if options.output != "table":
        print_data(report.as_json(), options.output)
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


def _where(options: ClusterOptions) -> tuple[Kube, str]:
    """Return the cluster and the namespace; empty: all namespaces."""
    if options.name and options.all_namespaces:
        raise UserError(f"{options.name} and -A: a service belongs to one namespace; give -n NAMESPACE instead of -A")
    kube = Kube.connect(options.kubeconfig, options.context)
    return kube, "" if options.all_namespaces else options.namespace or kube.namespace
