"""`status.loading`, and the loading progress in the Ready message: of the slowest pod. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fairlead_operator import names
from fairlead_operator.api.status import LoadingStatus
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, ready_at
from fairlead_operator.observed import PHASES, ObservedLoading

MAX_PODS = 8  # polled pods of one service: the slowest ones look alike, and of a thousand starting pods not all are polled


def pods_to_poll(pods: Iterable[Body]) -> dict[str, str]:
    """Return pod name → host:port of the workers that run and are not ready; empty once all are ready."""
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda body: str(body["metadata"].get("name", ""))):
        metadata, status = pod["metadata"], pod.get("status") or {}
        if component_of(pod) != names.WORKER or metadata.get("deletionTimestamp") or not status.get("podIP"):
            continue
        running = any((one.get("state") or {}).get("running") is not None for one in status.get("containerStatuses") or [])
        if running and ready_at(pod) is None and len(found) < MAX_PODS:
            found[metadata["name"]] = names.host_port(status["podIP"], names.WORKER_ADMIN_PORT)
    return found


def build_status(before: LoadingStatus | None, pods: Iterable[Body], seen: Mapping[str, ObservedLoading]) -> LoadingStatus | None:
    """Return the new status; None when nothing loads. Before the first answer, as after a restart, the previous one stays."""
    polled = pods_to_poll(pods)
    known = {pod: load for pod, load in seen.items() if pod in polled}
    if not polled:
        return None
    if not known:
        return before if before is not None and before.pod_name in polled else None
    pod, load = min(known.items(), key=lambda item: (PHASES[item[1].phase], item[1].percent, item[0]))
    return LoadingStatus.model_validate(
        {"phase": load.phase, "percent": load.percent, "total_bytes": load.total_bytes or None, "pod_name": pod}
    )


def add_progress(cause: Cause | None, loading: LoadingStatus | None) -> Cause | None:
    """Return a cause of reason Loading with the progress in its message; any other cause unchanged."""
    if cause is None or loading is None or cause.reason != "Loading":
        return cause
    amount = f" of {format_size(loading.total_bytes)}" if loading.total_bytes else ""
    share = f" {loading.percent} %{amount}" if loading.percent or loading.total_bytes else ""
    return replace(cause, message=f"{loading.phase}{share} (pod {loading.pod_name})")


def format_size(count: int) -> str:
    """Return bytes for people: `12.1 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
