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
from fairlead.kube.explain import Story, explain
from fairlead.kube.facts import gather
from fairlead.kube.picture import ServiceRow, read
from fairlead.kube.sections import Line

_MARKS = {True: "[green]✓[/]", False: "[red]✗[/]", None: " "}


def add_cluster(parser: argparse.ArgumentParser, *, everywhere: bool = True) -> None:
    """The flags by which kubectl names a cluster and a namespace."""
    parser.add_argument("-n", "--namespace", metavar="NS", default="", help="default: that of the context")
    if everywhere:
        parser.add_argument("-A", "--all-namespaces", action="store_true", help="of all namespaces")
    parser.add_argument("--context", metavar="C", default="", help="of the kubeconfig; default: its current one")
    parser.add_argument("--kubeconfig", metavar="FILE", default="", help="default: $KUBECONFIG, then ~/.kube/config")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="json: for scripts")


def add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default="", help="one service; default: all of the namespace")
    add_cluster(parser)
    parser.add_argument("--no-pods", action="store_true", help="services only")
    parser.add_argument("--no-live", action="store_true", help="do not ask the routers (which needs the verb get on pods/proxy)")


def add_top_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("top", help="services and pods of a cluster, live")
    parser.add_argument("name", nargs="?", default="", help="one service; default: all of the namespace")
    add_cluster(parser)
    parser.add_argument("--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two looks (default 2)")
    parser.add_argument("--no-pods", action="store_true", help="services only")
    parser.add_argument("--once", action="store_true", help="two looks, one table")
    parser.set_defaults(run=run_top)


def add_explain_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("explain", help="why a service is not ready, and what to do next; exit 1 while it is not")
    parser.add_argument("name", help="the InferenceService")
    add_cluster(parser, everywhere=False)
    parser.set_defaults(run=run_explain)


def named(arguments: argparse.Namespace) -> bool:
    """A cluster was asked for, in whatever way."""
    return bool(arguments.name or arguments.namespace or arguments.all_namespaces or arguments.context or arguments.kubeconfig)


def configured() -> bool:
    """There is a kubeconfig, or this is a pod with an account."""
    given = os.environ.get("KUBECONFIG", "")
    return bool(given or os.environ.get("KUBERNETES_SERVICE_HOST")) or (Path.home() / ".kube" / "config").exists()


def run_status(arguments: argparse.Namespace) -> int:
    """Exit 0: every service is ready; 1: one is not, or there is none."""
    kube, namespace = _where(arguments)
    rows = read(kube, namespace, arguments.name, live=not arguments.no_live)
    if arguments.output == "json":
        _print_json([row.as_json() for row in rows])
    else:
        console = make_console()
        if rows:
            console.print(table.services(rows, namespaces=not namespace, pods=not arguments.no_pods))
            table.words(console, rows)
        else:
            console.print(f"no InferenceServices{f' in namespace {namespace}' if namespace else ''}. See examples/ for a first one.")
    return 0 if rows and all(row.ready for row in rows) else 1


def run_top(arguments: argparse.Namespace) -> int:
    kube, namespace = _where(arguments)

    def look() -> list[ServiceRow]:
        return read(kube, namespace, arguments.name)

    if arguments.output == "json":
        rows, problem = next(top.frames(look, arguments.interval))
        if problem:
            raise UserError(problem)
        _print_json([row.as_json() for row in rows])
        return 0
    return top.run(
        make_console(), look, interval=arguments.interval, once=arguments.once, namespaces=not namespace, pods=not arguments.no_pods
    )


def run_explain(arguments: argparse.Namespace) -> int:
    """Exit 0: it is ready; 1: it is not."""
    kube = Kube.connect(arguments.kubeconfig, arguments.context)
    story = explain(gather(kube, arguments.namespace or kube.namespace, arguments.name), datetime.now(UTC))
    if arguments.output == "json":
        _print_json(story.as_json())
    else:
        tell(make_console(), story)
    return 0 if story.ready else 1


def tell(console: Console, story: Story) -> None:
    console.print(f"[bold {'green' if story.ready else 'red'}]{escape(story.headline)}[/]", soft_wrap=True)
    for title, lines in story.sections.items():
        if lines:
            console.print(f"\n[bold]{title}[/]")
            _tell_lines(console, lines)
    console.print("\n[bold]what to do next[/]")
    for number, one in enumerate(story.next, 1):
        console.print(f"  {number}. {escape(one)}", soft_wrap=True)


def _tell_lines(console: Console, lines: Sequence[Line]) -> None:
    for line in lines:
        console.print(f"  {_MARKS[line.well]} {escape(line.text)}", soft_wrap=True)


def _where(arguments: argparse.Namespace) -> tuple[Kube, str]:
    """The cluster, and the namespace to look at; empty: all."""
    if arguments.name and arguments.all_namespaces:
        raise UserError(f"{arguments.name} and -A: a service is of one namespace; give -n NAMESPACE instead of -A")
    kube = Kube.connect(arguments.kubeconfig, arguments.context)
    return kube, "" if arguments.all_namespaces else arguments.namespace or kube.namespace


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: between 0.1 and 3600 seconds")
    return value
