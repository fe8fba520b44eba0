"""`status.loading`, and what the Ready message says of a load: of the pod that is furthest behind. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fairlead_operator import names
from fairlead_operator.api.loading import LoadingStatus
from fairlead_operator.causes import Cause
from fairlead_operator.objects import Body, component_of, ready_at
from fairlead_operator.observed import PHASES, LoadingSeen

MOST = 8  # pods of one service that are asked: the ones furthest behind look alike, and a thousand that start together are not all asked


def pods_to_ask(pods: Iterable[Body]) -> dict[str, str]:
    """Pod name → host:port of workers that run and are not ready; none of a service whose workers all are."""
    found: dict[str, str] = {}
    for pod in sorted(pods, key=lambda body: str(body["metadata"].get("name", ""))):
        metadata, status = pod["metadata"], pod.get("status") or {}
        if component_of(pod) != names.WORKER or metadata.get("deletionTimestamp") or not status.get("podIP"):
            continue
        running = any((one.get("state") or {}).get("running") is not None for one in status.get("containerStatuses") or [])
        if running and ready_at(pod) is None and len(found) < MOST:
            found[metadata["name"]] = names.host_port(status["podIP"], names.WORKER_ADMIN_PORT)
    return found


def said(before: LoadingStatus | None, pods: Iterable[Body], seen: Mapping[str, LoadingSeen]) -> LoadingStatus | None:
    """What to write; None when nothing loads. Before the first answer (a restarted operator) what was written stays."""
    asked = pods_to_ask(pods)
    known = {pod: load for pod, load in seen.items() if pod in asked}
    if not asked:
        return None
    if not known:
        return before if before is not None and before.pod_name in asked else None
    pod, load = min(known.items(), key=lambda item: (PHASES[item[1].phase], item[1].percent, item[0]))
    return LoadingStatus.model_validate(
        {"phase": load.phase, "percent": load.percent, "total_bytes": load.total_bytes or None, "pod_name": pod}
    )


def told(cause: Cause | None, loading: LoadingStatus | None) -> Cause | None:
    """A cause that says only that something loads, with how far that is."""
    if cause is None or loading is None or cause.reason != "Loading":
        return cause
    amount = f" of {size(loading.total_bytes)}" if loading.total_bytes else ""
    share = f" {loading.percent} %{amount}" if loading.percent or loading.total_bytes else ""
    return replace(cause, message=f"{loading.phase}{share} (pod {loading.pod_name})")


def size(count: int) -> str:
    """Bytes for people: `12.1 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 2**power:
            return f"{count / 2**power:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"
