"""A folder of the node as a claim. The restricted Pod Security Standard allows claims and refuses hostPath volumes in pods."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.system import System


@contextmanager
def claim(system: System, name: str, folder: str | Path, access: str = "ReadOnlyMany") -> Iterator[str]:
    """Provide a claim that is bound to a folder of the node, and its name. `access`: an access mode of Kubernetes."""
    bound = f"fairlead-e2e-{name}"
    shared = {"accessModes": [access], "storageClassName": ""}
    system.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": bound},
            "spec": {
                **shared,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": system.models, "name": name},
                "hostPath": {"path": str(folder)},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": system.models},
            "spec": {**shared, "volumeName": bound, "resources": {"requests": {"storage": "1Gi"}}},
        },
    )
    try:
        yield name
    finally:
        system.cluster.kubectl("delete", f"pvc/{name}", "-n", system.models, "--wait=false")
        system.cluster.kubectl("delete", f"pv/{bound}", "--wait=false")
