"""The service of one row in a namespace of its own, and what Kubernetes' components without a process here write: kubelets, volumes."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.operator.support.apiserver import ApiServer
from tests.operator.support.cluster import Cluster, eventually

from .network import Network
from .worker_errors import WorkerErrors

PAUSE = 0.5  # seconds between two looks at the API server: many rows look at the same time


class Case(Cluster):
    """One row. `network`: the routers that the operator reaches; `folder`: for files of real processes."""

    def __init__(self, server: ApiServer, namespace: str, network: Network, worker_errors: WorkerErrors, folder: Path) -> None:
        super().__init__(server, namespace)
        self.network, self.worker_errors, self.folder = network, worker_errors, folder

    def post(self, plural: str, kind: str, name: str, /, **body: Any) -> None:
        """Create an object of the core group."""
        self.server.create(self.path(plural), {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **body})

    def until(self, look: Any) -> Any:
        return eventually(look, within=120, pause=PAUSE)

    def pods(self, component: str = "worker") -> list[Any]:
        """Return the pods that do not terminate, newest first."""
        found = self.server.get(self.path("pods") + f"?labelSelector=app.kubernetes.io/component={component}")["items"]
        return sorted((pod for pod in found if not pod["metadata"].get("deletionTimestamp")), key=_age, reverse=True)

    def placed_pod(self, component: str = "worker") -> Any:
        """Return the newest pod of the component once the scheduler has given it a node."""

        def look() -> Any:
            pods = self.pods(component)
            return pods[0] if pods and pods[0]["spec"].get("nodeName") else None

        return self.until(look)

    def report(self, status: dict[str, Any], component: str = "worker", pod: Any = None) -> Any:
        """Write the status of a pod (None: the newest of the component) as its kubelet does. Returns the pod."""
        pod = pod or self.placed_pod(component)
        scheduled = [one for one in pod["status"].get("conditions", []) if one["type"] == "PodScheduled"]
        container = {"name": pod["spec"]["containers"][0]["name"], "image": pod["spec"]["containers"][0]["image"], "imageID": ""}
        containers = [{"restartCount": 0, "ready": False, **container, **one} for one in status.get("containerStatuses", [])]
        written = {"phase": "Pending", **status, "containerStatuses": containers, "conditions": [*scheduled, *status.get("conditions", [])]}
        self.patch("pods", pod["metadata"]["name"], {"status": written}, "status")
        return pod

    def run(self, component: str, **status: Any) -> Any:
        """Report the component's newest pod as ready."""
        return self.report({**ready(), **status}, component)

    def serve(self, workers: int = 1) -> None:
        """Report all workers and the router as ready, and wait until a completion has gone through."""
        self.run("router")
        self.until(lambda: len([pod for pod in self.pods() if pod["spec"].get("nodeName")]) == workers)
        for pod in self.pods():
            self.report(ready(), pod=pod)
        self.until(lambda: self.condition("Progressing").get("reason") == "Complete")

    def edit(self, **spec: Any) -> None:
        self.patch("inferenceservices", "qwen", {"spec": spec})

    def end(self, pod: Any) -> None:
        """Wait until a controller has deleted the pod, and end it as its kubelet does."""
        name = pod["metadata"]["name"]
        self.until(lambda: (self.get("pods", name) or pod)["metadata"].get("deletionTimestamp"))
        self.server.request("DELETE", self.path("pods", name) + "?gracePeriodSeconds=0")

    def event(self, reason: str, message: str, pod: Any) -> None:
        """Write an Event of a pod as its kubelet does."""
        time = now()
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "e-", "namespace": self.namespace}}
        event |= {"reason": reason, "message": message, "type": "Warning", "firstTimestamp": time, "lastTimestamp": time, "count": 1}
        involved = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "namespace": self.namespace}
        self.server.create(self.path("events"), event | {"involvedObject": involved})

    def make_secret(self, name: str) -> None:
        """Create a Secret without keys."""
        self.post("secrets", "Secret", name)

    def claim(self, name: str, node: str = "") -> None:
        """Create a claim; with a volume of `node` bound to it, as the volume binder does."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}, "storageClassName": ""}
        bound = {"volumeName": f"{self.namespace}-{name}"} if node else {}
        done = {"annotations": {"pv.kubernetes.io/bind-completed": "yes"}} if node else {}
        body = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, **done}, "spec": {**spec, **bound}}
        self.server.create(self.path("persistentvolumeclaims"), body)
        if not node:
            return
        terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]
        volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "local": {"path": "/mnt"}}
        volume["claimRef"] = {"kind": "PersistentVolumeClaim", "namespace": self.namespace, "name": name}
        volume["nodeAffinity"] = {"required": {"nodeSelectorTerms": terms}}
        made = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": bound["volumeName"]}, "spec": volume}
        self.server.create("/api/v1/persistentvolumes", made)
        self.patch("persistentvolumeclaims", name, {"status": {"phase": "Bound", "capacity": {"storage": "1Gi"}}}, "status")


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": message}}}]}


def ended(message: str, code: int = 1, reason: str = "Error", restarts: int = 0) -> dict[str, Any]:
    """A container that has ended, and that its kubelet is about to restart."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Running", "containerStatuses": [{"state": state, "restartCount": restarts}]}


def running(*, served: bool = False) -> dict[str, Any]:
    """A container that runs and is not ready. `served`: it was ready before."""
    ready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": now()}
    started = "2026-01-01T00:00:00Z" if served else now()
    return {
        "phase": "Running",
        "containerStatuses": [{"state": {"running": {"startedAt": started}}, "started": served}],
        "conditions": [ready] if served else [],
    }


def ready() -> dict[str, Any]:
    return {
        "phase": "Running",
        "containerStatuses": [{"ready": True, "started": True, "state": {"running": {"startedAt": now()}}}],
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now()} for kind in ("Ready", "ContainersReady")],
    }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _age(pod: Any) -> tuple[str, str]:
    return pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]
