"""Security contexts of the restricted Pod Security profile."""

from typing import Any

USER = 65532  # "nonroot" in distroless images; the images of this project use it too


def pod_context(*, assigned: bool) -> dict[str, Any]:
    """Return the context of a pod. `assigned`: the cluster chooses user and groups, as OpenShift's SCC restricted-v2 does."""
    return {
        "runAsNonRoot": True,
        **({} if assigned else {"runAsUser": USER, "runAsGroup": USER, "fsGroup": USER}),
        "fsGroupChangePolicy": "OnRootMismatch",  # otherwise every start changes the owner of all files of a model cache
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_context() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
