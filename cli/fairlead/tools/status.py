"""`fairlead status`: the local runs on this machine, the router at `--url`, or a cluster.

It shows a cluster if the flags select one, or if nothing runs locally.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from fairlead.console import fit_table, make_console
from fairlead.errors import UserError, check_http_url
from fairlead.kube import command as kube
from fairlead.kube.command import StatusOptions
from fairlead.kube.live import ignored_lines
from fairlead.local.rundir import RunRecord
from fairlead.options import KeyFile, Url, key_headers, print_data, takes
from fairlead.program import describe, new_app
from fairlead.tools.runs import NothingRuns, find_runs, services_of, unready_lines
from fairlead.tools.score import read_score, request_body, show_score

SECONDS = 5.0
COLUMNS = ("POD", "STATE", "RUNNING", "WAITING", "BACKLOG TOKENS", "PREFILL TOKENS/S", "PAGES FREE", "CACHE ERROR", "ADDRESS")


app = new_app()


@dataclass(frozen=True, kw_only=True)
class Options(StatusOptions):
    """The options of `fairlead status`."""

    url: Url = ""
    api_key_file: KeyFile = None
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="With --url: where the router would send it, by each term of the score; @FILE: a request's JSON."
        ),
    ] = None


@app.command(
    help=describe(
        "Services, pods and workers: your `fairlead up` runs on this machine, the router at --url, or a cluster. "
        "Exit status 1 while a service is not ready.",
        "fairlead status",
        "fairlead status -n team-a",
        "fairlead status --url http://127.0.0.1:8082 --prompt 'Once upon a time'",
    )
)
@takes(Options)
def run(options: Options) -> int:
    """Return 1 if a router does not answer, nothing runs, a service is not ready, or a prompt has no worker."""
    if options.prompt is not None and not options.url:
        raise UserError("--prompt needs --url: the router that would send it")
    runs = find_runs(options, options.url)
    if runs is None:
        return kube.run_status(options)
    console, headers = make_console(), key_headers(options.api_key_file)
    if options.prompt is not None:
        found = read_score(options.url, request_body(options.prompt), headers)
        if options.output == "table":
            show_score(console, found)
        else:
            print_data(found, options.output)
        return 0 if found["workers"] else 1
    if options.url:
        page = read_workers(options.url, headers)
        if options.output == "table":
            show(console, options.url, page)
        else:
            print_data([page], options.output)
        return 0 if is_ready(page) else 1
    if not runs:
        if options.output == "table":
            print(NothingRuns(options.name))
        else:
            print_data([], options.output)
        return 1
    return _show_runs(console, runs, options, headers)


def _show_runs(console: Console, runs: Sequence[RunRecord], options: Options, headers: Mapping[str, str]) -> int:
    pages, failed = [], False
    for record in runs:
        if options.output == "table":
            console.print(f"[dim]{escape(record.command)}, process {record.pid}[/]", soft_wrap=True)
        for _, service, url in services_of([record], options.name):
            try:
                page = read_workers(url, headers or record.credential) | {
                    "service": service,
                    "url": f"{url}/v1",
                    "model": record.models.get(service, ""),
                }
                pages.append(page)
                if options.output == "table":
                    show(console, url, page)
            except UserError as error:
                failed = True
                print(error, file=sys.stderr)
            unready = unready_lines(record, service)
            failed |= bool(unready)
            if options.output == "table":
                for line in unready:
                    console.print(line, style="yellow", markup=False, soft_wrap=True)
                if call := record.calls.get(service):
                    console.print(f"call: {call}", markup=False, soft_wrap=True)
    if options.output != "table":
        print_data(pages, options.output)
    return 1 if failed else 0


class KeyRefused(UserError):
    """The server needs an API key, or another one."""


def read_workers(url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the router's `/fairlead/workers`, or of a worker its part of such a page.

    Raises KeyRefused, and UserError if neither answers there.
    """
    base = check_http_url("--url", url)
    page = f"{base}/fairlead/workers"
    try:
        answer = httpx.get(page, timeout=SECONDS, headers=headers, trust_env=False)
        if answer.status_code in (401, 404) and (worker := _read_worker(base, headers)):
            return worker
        if answer.status_code in (401, 403):
            raise KeyRefused(f"{page}: HTTP {answer.status_code}: give --api-key-file with a key of this service")
        if answer.status_code != 200:
            raise UserError(f"{page}: HTTP {answer.status_code}: not a Fairlead router. Give its URL (in a cluster: port 8082)")
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise UserError(
            f"{page}: {str(error).rstrip('.')}. Check that a Fairlead router runs there (in a cluster: its admin port, 8082)."
        ) from None
    if not isinstance(found, dict) or "workers" not in found:
        raise UserError(f"{page}: not a Fairlead router's answer")
    return found


def _read_worker(base: str, headers: Mapping[str, str] | None) -> dict[str, Any] | None:
    """Return the page of a worker without a router, from its `/load`; None for another server. Raises ValueError and httpx errors."""
    answer = httpx.get(f"{base}/load", timeout=SECONDS, headers=headers, trust_env=False)
    load = answer.json() if answer.status_code == 200 else None
    if not isinstance(load, dict) or "max_running" not in load:
        return None
    return {"workers": [{name: load.get(name) for name in ("pod", "address", "ready", "draining")} | {"load": load}]}


def show(console: Console, url: str, found: dict[str, Any]) -> None:
    read = f" ({found['index_read']})" if found.get("index_read") else ""
    routing = f"policy {found.get('policy', '')}, index {found.get('index', '')}{read}" if "index" in found else "a worker without a router"
    model = f"  model {escape(found['model'])}" if found.get("model") else ""
    console.print(f"[bold]{escape(found.get('service') or '')}[/]  {found.get('url', url)}{model}  {routing}".strip(), soft_wrap=True)
    if found.get("index_reason"):
        console.print(f"[yellow]index unavailable:[/] {found['index_reason']}", soft_wrap=True, highlight=False)
    rows = []
    for worker in found["workers"]:
        load = worker.get("load") or {}
        rows.append(
            [
                escape(worker.get("pod") or worker.get("address", "?")),
                state_of(worker),
                str(load.get("running", 0)),
                str(load.get("waiting", 0)),
                str(load.get("backlog_tokens", 0)),
                f"{load.get('prefill_rate', 0):.0f}",
                f"{load.get('pages_free', 0)}/{load.get('pages_total', 0)}",
                prediction_error(worker),
                escape(worker.get("address", "")),
            ]
        )
    table = fit_table(COLUMNS, rows, left=2, width=console.width, optional=("ADDRESS", "CACHE ERROR", "PREFILL TOKENS/S", "BACKLOG TOKENS"))
    console.print(table if rows else "  no workers")
    for line in ignored_lines(found.get("ignored_records") or ()):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    for worker in found["workers"]:
        if worker.get("reason"):
            where = worker.get("pod") or worker.get("address", "?")
            console.print(f"{where}: {worker['reason']}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def is_ready(page: Mapping[str, Any]) -> bool:
    """Return whether a worker of `read_workers` takes requests."""
    return any(worker.get("ready") and not worker.get("draining") and worker.get("usable", True) for worker in page["workers"])


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
