"""`fairlead top`: live load of local runs, of the router at `--url`, or of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fairlead.errors import UserError
from fairlead.kube import command as kube
from fairlead.kube.command import TopOptions
from fairlead.kube.live import Live
from fairlead.kube.snapshot import PodRow, ServiceRow, sum_figures, worker_figures
from fairlead.options import KeyFile, Url, key_headers, takes
from fairlead.program import describe, new_app
from fairlead.tools.runs import NothingRuns, find_runs, service_row, services_of
from fairlead.tools.status import read_workers

app = new_app()


@dataclass(frozen=True, kw_only=True)
class Options(TopOptions):
    """The options of `fairlead top`."""

    url: Url = ""
    api_key_file: KeyFile = None


@app.command(
    help=describe(
        "Live load of services and pods: your `fairlead up` runs, the router at --url, or a cluster, until Ctrl-C.",
        "fairlead top",
        "fairlead top -n team-a --interval 5",
        "fairlead top --url http://127.0.0.1:8082 --once -o json",
    )
)
@takes(Options)
def run(options: Options) -> int:
    runs = find_runs(options, options.url)
    if runs is None:
        return kube.run_top(options)
    if not runs and not options.url:
        raise NothingRuns(options.name)
    headers = key_headers(options.api_key_file)

    def read_rows() -> list[ServiceRow]:
        if options.url:
            return [router_row(options.url, read_workers(options.url, headers))]
        current = find_runs(replace(options, context="", kubeconfig="")) or []
        return [
            service_row(run, service, _page(url, headers or run.credential)) for run, service, url in services_of(current, options.name)
        ]

    return kube.show_top(options, read_rows, namespaces=False)


def _page(url: str, headers: Mapping[str, str]) -> dict[str, Any] | None:
    try:
        return read_workers(url, headers)
    except UserError:
        return None


def router_row(url: str, page: Mapping[str, Any]) -> ServiceRow:
    """Return the row of a service as one router sees it."""
    pods = [
        PodRow(str(one.get("pod") or one["address"]), "worker", _state(one), "", 0, worker_figures(one), str(one.get("reason") or ""))
        for one in page["workers"]
    ]
    usable = sum(pod.state == "Ready" for pod in pods)
    return ServiceRow(
        namespace="",
        name=str(page.get("service") or url),
        ready=usable > 0,
        counts=f"{usable}/{len(pods)}",
        reason="Serving" if usable else "NotReady",
        message="",
        loading="",
        revision="",
        figures=sum_figures([pod.figures for pod in pods], Live(), {}),
        pods=pods,
    )


def _state(worker: Mapping[str, Any]) -> str:
    return (
        "Draining"
        if worker.get("draining")
        else "NotReady"
        if not worker.get("ready")
        else "Ready"
        if worker.get("usable", True)
        else "Avoided"
    )
