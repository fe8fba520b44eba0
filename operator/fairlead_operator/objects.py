"""Kubernetes objects as dicts: the ones that this package builds, and readers for those of the API server. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from fairlead_operator import names

Object = dict[str, Any]
"""An object for server-side apply."""
Body = Mapping[str, Any]
"""An object as the API server returned it."""


def conditions_of(body: Body | None) -> dict[str, Body]:
    """Return the conditions in the status of an object, by their types."""
    return {one["type"]: one for one in ((body or {}).get("status") or {}).get("conditions") or []}


def is_canary(pod: Body) -> bool:
    return ((pod.get("metadata") or {}).get("labels") or {}).get(names.TRACK) == names.CANARY_TRACK


def component_of(body: Body) -> str:
    return str(((body.get("metadata") or {}).get("labels") or {}).get(names.COMPONENT, ""))


def has_ended(pod: Body) -> bool:
    """Return whether the pod has ended, for example by eviction: it stays listed for days, while another replaces it."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def has_no_pod(job: Body) -> bool:
    """Return whether the Job has neither a pod nor an end: its status does not say why no pod can be created."""
    counted = any((job.get("status") or {}).get(count) for count in ("active", "succeeded", "failed"))
    return not counted and not any(one["status"] == "True" for one in conditions_of(job).values())


def ready_at(pod: Body) -> float | None:
    """Return since when the pod is ready, in seconds since the epoch; None: it is not."""
    ready = conditions_of(pod).get("Ready", {})
    return parse_time(ready.get("lastTransitionTime")) if ready.get("status") == "True" else None


def parse_time(text: Any) -> float:
    """Return an RFC 3339 time in seconds since the epoch; 0.0 for none."""
    return datetime.fromisoformat(str(text)).timestamp() if text else 0.0


def format_time(time: datetime) -> str:
    """Return a time of UTC as the API server writes it, in whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
