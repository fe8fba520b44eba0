"""kstatus of kubernetes-sigs/cli-utils for a custom resource (pkg/kstatus/status: checkGenericProperties, checkReadyCondition)."""

from typing import Any


def compute_kstatus(status: dict[str, Any], generation: int) -> str:
    """Return InProgress, Failed or Current, as Flux and Helm would."""
    if status.get("observedGeneration", generation) != generation:
        return "InProgress"
    for one in status.get("conditions", []):
        if one["type"] in ("Reconciling", "Stalled") and one["status"] == "True":
            return "InProgress" if one["type"] == "Reconciling" else "Failed"
    ready = next((one["status"] for one in status.get("conditions", []) if one["type"] == "Ready"), None)
    return "Current" if ready in (None, "True") else "InProgress"
