"""`fairlead explain`: why a service of a local run, of the router at `--url`, or of a cluster is not ready, and what to do next."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from fairlead.console import make_console
from fairlead.errors import UserError
from fairlead.kube import command as kube
from fairlead.kube.command import ExplainOptions, print_report
from fairlead.kube.explain import Report
from fairlead.kube.sections import Line
from fairlead.local.rundir import RunRecord
from fairlead.options import KeyFile, Url, key_headers, print_data, takes
from fairlead.program import describe, new_app
from fairlead.tools.runs import NothingRuns, find_runs, services_of, unready_lines
from fairlead.tools.status import KeyRefused, read_workers

app = new_app()


@dataclass(frozen=True, kw_only=True)
class Options(ExplainOptions):
    """The options of `fairlead explain`."""

    name: Annotated[str, typer.Argument(metavar="NAME", help="The service (default: the only one that runs on this machine).")] = ""
    url: Url = ""
    api_key_file: KeyFile = None


@app.command(
    help=describe(
        "Why a service is not ready, and what to do next. Exit status 1 if it is not ready.",
        "fairlead explain",
        "fairlead explain qwen -n team-a",
    )
)
@takes(Options)
def run(options: Options) -> int:
    runs = find_runs(options, options.url)
    if runs is None:
        return kube.run_explain(options)
    headers = key_headers(options.api_key_file)
    if options.url:
        report = explain_router(options.url, read_workers(options.url, headers))
    else:
        found = services_of(runs, options.name)
        if not found:
            raise NothingRuns(options.name)
        if len(found) > 1:
            raise UserError(f"several services run here: give the NAME of one: {', '.join(service for _, service, _ in found)}")
        report = explain_run(*found[0], headers)
    if options.output == "table":
        print_report(make_console(), report)
    else:
        print_data(report.as_json(), options.output)
    return 0 if report.ready else 1


def explain_run(record: RunRecord, service: str, url: str, headers: Mapping[str, str]) -> Report:
    """Build the report of a local service from the states of its pods and from its router."""
    problems = unready_lines(record, service)
    pods = record.pods_of(service)
    about = [Line(f"{record.command}, process {record.pid}"), Line(f"{url}/v1, model {record.models.get(service, '?')}")]
    steps = []
    try:
        seen = explain_router(url, read_workers(url, headers or record.credential))
    except UserError as error:
        problems.append(str(error))
        seen = None
        if isinstance(error, KeyRefused):
            steps.append("Give --api-key-file with a key of this service.")
    if not record.replicas.get(service, 1):
        steps.append(f"Set spec.replicas to 1 or more in {record.manifest}, or send a request.")
    for pod in pods:
        if pod["phase"] == "CrashLoopBackOff":
            where = f" in {record.manifest} and save" if record.manifest else ""
            steps.append(f"Read {pod['log']} and correct its cause{where}: the pod restarts by itself.")
        elif not pod["ready"] and record.replicas.get(service, 1):
            steps.append(f"Wait for {pod['name']} ({pod['phase']}), and follow {pod['log']}.")
    report = Report(
        "local", service, not problems, f"{service} on this machine is {'ready' if not problems else f'not ready: {problems[0]}'}"
    )
    report.sections = {
        "service": about,
        "pods": [
            Line(f"{pod['name']}: {pod['phase']} {pod['reason']}".rstrip() + _restarts(pod["restarts"]), pod["ready"]) for pod in pods
        ],
        **(seen.sections if seen else {"router": [Line(problems[-1], False)]}),
    }
    report.next = steps or (["Nothing: it serves."] if report.ready else [f"Check that process {record.pid} still runs: fairlead status."])
    return report


def explain_router(url: str, page: Mapping[str, Any]) -> Report:
    """Build the report of a service as one router sees it."""
    workers = page["workers"]
    usable = [one for one in workers if one.get("ready") and one.get("usable", True)]
    name = str(page.get("service") or url)
    if "index" in page:
        report = Report("", name, bool(usable), f"{name}: the router uses {len(usable)} of {len(workers)} workers")
        lines = [Line(f"index {page['index']} {page.get('index_reason') or ''}".rstrip(), not page.get("index_reason"))]
    else:
        report = Report("", name, bool(usable), f"{name}: a worker without a router, {'ready' if usable else 'not ready'}")
        lines = []
    for one in workers:
        reason = one.get("reason") or ("" if one in usable else "not usable")
        lines.append(Line(f"{one.get('pod') or one['address']}: {reason or 'usable'}", one in usable))
    report.sections = {"router" if "index" in page else "worker": lines}
    report.next = ["Nothing: it serves."] if usable else ["Start a worker, or read the log of one that does not become ready."]
    return report


def _restarts(count: int) -> str:
    return f", {count} restarts" if count else ""
