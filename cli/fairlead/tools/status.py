"""`fairlead status`: the local runs on this machine, the router at `--url`, or a cluster.

It shows a cluster if the flags select one, or if nothing runs locally.
"""

import argparse
import json
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from fairlead.console import make_console
from fairlead.errors import UserError, check_http_url
from fairlead.kube import command as kube
from fairlead.kube.live import ignored_lines
from fairlead.local.rundir import running
from fairlead.tools.score import read_score, request_body, show_score

SECONDS = 5.0


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="services, pods and workers on this machine, behind a router, or in a cluster")
    parser.add_argument(
        "--url", metavar="U", help="a router's admin port, http://host:port (default: all your `fairlead up` runs on this machine)"
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="with --url: where the router would send it, by each term of the score; @FILE: a request's JSON body",
    )
    kube.add_status(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a router does not answer, nothing runs, or a service of the cluster is not ready."""
    if arguments.url and kube.names_cluster(arguments):
        raise UserError("--url selects a router, and the other flags select a cluster: give only one of them")
    if arguments.prompt is not None and not arguments.url:
        raise UserError("--prompt needs --url: the router that would send it")
    runs = [] if arguments.url or kube.names_cluster(arguments) else running()
    if not arguments.url and not runs and (kube.names_cluster(arguments) or kube.has_kubeconfig()):
        return kube.run_status(arguments)
    console = make_console()
    if arguments.prompt is not None:
        found = read_score(arguments.url, request_body(arguments.prompt))
        if arguments.output == "json":
            print(json.dumps(found, indent=2))
        else:
            show_score(console, found)
        return 0
    if arguments.output == "json":
        urls = [arguments.url] if arguments.url else [url for record in runs for url in record.urls.values()]
        print(json.dumps([read_workers(url) for url in urls], indent=2))
        return 0 if urls else 1
    if arguments.url:
        show(console, arguments.url, read_workers(arguments.url))
        return 0
    if not runs:
        console.print("no local run was found. Start a service with `fairlead up -f FILE`, or give --url of a router or a kubeconfig.")
        return 1
    failed = False
    for record in runs:
        console.print(f"[dim]{record.manifest}, process {record.pid}[/]", soft_wrap=True)
        for url in record.urls.values():
            try:
                show(console, url, read_workers(url))
            except UserError as error:
                failed = True
                console.print(str(error), style="red", markup=False, soft_wrap=True)
    return 1 if failed else 0


def read_workers(url: str) -> dict[str, Any]:
    """Return the router's `/fairlead/workers`. Raises UserError if no Fairlead router answers there."""
    page = f"{check_http_url('--url', url)}/fairlead/workers"
    try:
        answer = httpx.get(page, timeout=SECONDS, trust_env=False)
        answer.raise_for_status()
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(
            f"{page}: {str(error).rstrip('.')}. Check that a Fairlead router runs there (in a cluster: its admin port, 8082)."
        ) from None
    if not isinstance(found, dict) or "workers" not in found:
        raise UserError(f"{page}: not a Fairlead router's answer")
    return found


def show(console: Console, url: str, found: dict[str, Any]) -> None:
    read = f" ({found['index_read']})" if found.get("index_read") else ""
    console.print(
        f"[bold]{found.get('service', '')}[/]  {url}  policy {found.get('policy', '')}, index {found.get('index', '')}{read}",
        soft_wrap=True,
    )
    if found.get("index_reason"):
        console.print(f"[yellow]index unavailable:[/] {found['index_reason']}", soft_wrap=True, highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("POD")
    table.add_column("STATE")
    for column in ("RUNNING", "WAITING", "BACKLOG TOKENS", "PREFILL TOKENS/S", "PAGES FREE", "CACHE ERROR"):
        table.add_column(column, justify="right")
    table.add_column("ADDRESS")
    for worker in found["workers"]:
        load = worker.get("load") or {}
        pages = f"{load.get('pages_free', 0)}/{load.get('pages_total', 0)}"
        figures = (
            str(load.get("running", 0)),
            str(load.get("waiting", 0)),
            str(load.get("backlog_tokens", 0)),
            f"{load.get('prefill_rate', 0):.0f}",
        )
        table.add_row(worker.get("pod") or "?", state_of(worker), *figures, pages, prediction_error(worker), worker.get("address", ""))
    console.print(table if found["workers"] else "  no workers")
    for line in ignored_lines(found.get("ignored_records") or ()):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for worker in found["workers"]:
        if worker.get("reason"):
            where = worker.get("pod") or worker.get("address", "?")
            console.print(f"{where}: {worker['reason']}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def prediction_error(worker: dict[str, Any]) -> str:
    """Return the index's recent error about the worker's cache, as a share of the prompt: `+` predicted too much, `-` too little."""
    prediction = worker.get("prediction") or {}
    if not prediction.get("answers"):
        return "-"
    over, under = prediction.get("over", 0.0), prediction.get("under", 0.0)
    return f"+{over:.0%}" if over >= under else f"-{under:.0%}"


def state_of(worker: dict[str, Any]) -> str:
    if worker.get("draining"):
        return "[yellow]Draining[/]"
    if not worker.get("ready"):
        return "[red]NotReady[/]"
    return "[green]Ready[/]" if worker.get("usable", True) else "[yellow]Avoided[/]"
