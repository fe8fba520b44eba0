"""Which of local runs, a router and a cluster a command is about, and local runs as rows of the same tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.errors import UserError
from fairlead.kube import command as kube
from fairlead.kube.command import ServiceOptions
from fairlead.kube.live import Live
from fairlead.kube.snapshot import PodRow, ServiceRow, sum_figures, worker_figures
from fairlead.local.rundir import PodRecord, RunRecord, running


class NothingRuns(UserError):
    """No run on this machine has the service, and no cluster is known."""

    def __init__(self, name: str = "") -> None:
        what = f"no local run of {name} was found" if name else "no local run was found"
        start = "Start one with `fairlead serve MODEL` or `fairlead up -f FILE`"
        super().__init__(f"{what}. {start}, or give --url of a router or --kubeconfig of a cluster.")


def find_runs(options: ServiceOptions, url: str = "") -> list[RunRecord] | None:
    """Return the local runs that the options mean; None: they mean a cluster.

    A cluster is meant if a flag selects it, or if nothing here runs the service and there is a kubeconfig. Raises UserError.
    """
    if url and kube.names_cluster(options):
        raise UserError("--url selects a router, and the other flags select a cluster: give only one of them")
    if url and options.name:
        raise UserError(f"--url selects the one service of a router: leave out {options.name}")
    if url:
        return []
    if kube.names_cluster(options):
        return None
    runs = [run for run in running() if options.name in ("", *run.urls)]
    return None if not runs and kube.has_kubeconfig() else runs


def service_row(record: RunRecord, service: str, page: Mapping[str, Any] | None) -> ServiceRow:
    """Return the row of a local service. `page`: its router's `/fairlead/workers`, None if it does not answer."""
    seen = {str(one.get("pod")): one for one in (page or {}).get("workers", ())}
    pods = [_pod_row(pod, seen.get(pod["name"], {})) for pod in record.pods_of(service)]
    wanted = record.replicas.get(service, 0)
    ready = sum(pod["ready"] for pod in record.pods_of(service) if pod["component"] == "worker")
    problems = unready_lines(record, service)
    return ServiceRow(
        namespace="local",
        name=service,
        ready=not problems and page is not None,
        counts=f"{ready}/{wanted}",
        reason="Serving" if not problems else "ScaledToZero" if not wanted else "NotReady",
        message=problems[0] if problems else "",
        loading="",
        revision="",
        figures=sum_figures([pod.figures for pod in pods if pod.component == "worker"], Live(), {}),
        pods=pods,
        notes=problems[1:],
    )


def _pod_row(pod: PodRecord, seen: Mapping[str, Any]) -> PodRow:
    loading = f"{pod['percent']} %" if pod["percent"] is not None and not pod["ready"] else ""
    state = "Ready" if pod["ready"] else pod["phase"]
    return PodRow(pod["name"], pod["component"], state, loading, pod["restarts"], worker_figures(seen), pod["reason"])


def unready_lines(record: RunRecord, service: str) -> list[str]:
    """Return why the service is not ready, one line for each pod; nothing if it is."""
    lines = []
    if service in record.replicas and not record.replicas[service]:
        lines.append(f"{service}: spec.replicas is 0, so no worker runs; the next request starts one")
    for pod in record.pods_of(service):
        if not pod["ready"]:
            lines.append(f"{pod['name']}: {pod['phase']} {pod['reason']}".rstrip() + f"; log: {pod['log']}")
    return lines


def services_of(runs: Sequence[RunRecord], name: str) -> list[tuple[RunRecord, str, str]]:
    """Return (run, service, URL of its router) of all local services, or of those with this name."""
    return [(run, service, url) for run in runs for service, url in run.urls.items() if name in ("", service)]
