"""The real Deployment and ReplicaSet controllers and scheduler on an API server of their own; nodes and kubelets are simulated."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.operator.support import apiserver
from tests.operator.support.cluster import install_crds

MERGE = "application/merge-patch+json"
NAMESPACE = "default"
Process = subprocess.Popen[bytes]
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def missing() -> str:
    """Return what is missing; empty: `running` can start."""
    names = [name for name in ("kube-controller-manager", "kube-scheduler") if apiserver.program(name) is None]
    return apiserver.missing() or (f"{' and '.join(names)} not found: run `make kubernetes` once" if names else "")


@contextmanager
def start(folder: Path) -> Iterator[apiserver.ApiServer]:
    with apiserver.start() as server:
        install_crds(server)
        with run_components(server, folder, ("deployment-controller", "replicaset-controller")):
            yield server


@contextmanager
def run_components(server: apiserver.ApiServer, folder: Path, controllers: Sequence[str], *flags: str) -> Iterator[dict[str, Process]]:
    """Run kube-controller-manager, with these `controllers` and `flags`, and kube-scheduler. Yields them by name."""
    common = [f"--kubeconfig={server.kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    quick = ["--kube-api-qps=500", "--kube-api-burst=1000"]
    commands = {
        "kube-controller-manager": [*common, *quick, f"--controllers={','.join(controllers)}", *flags],
        "kube-scheduler": [*common, *quick],
    }
    processes: dict[str, Process] = {}
    try:
        for name, arguments in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen([str(apiserver.program(name)), *arguments], stdout=log, stderr=log)
        yield processes
        assert all(process.poll() is None for process in processes.values()), "a controller has ended"
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def make_node(server: apiserver.ApiServer, name: str, gpus: int) -> None:
    server.create(
        "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}
    )
    patch(server, f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # an API server taints nodes until a controller has seen them
    set_gpus(server, name, gpus)


def set_gpus(server: apiserver.ApiServer, name: str, gpus: int) -> None:
    room = {"cpu": "64", "memory": "256Gi", "pods": "110", "nvidia.com/gpu": str(gpus)}
    ready = [{"type": "Ready", "status": "True", "reason": "Played"}]
    patch(server, f"/api/v1/nodes/{name}/status", {"status": {"capacity": room, "allocatable": room, "conditions": ready}})


def patch(server: apiserver.ApiServer, path: str, body: Any) -> Any:
    code, answer = server.request("PATCH", path, body, MERGE)
    assert code == 200, answer
    return answer


class Kubelets:
    """All kubelets: whatever has a node becomes ready, unless `broken` says that it never does; whatever is to go, goes at once."""

    def __init__(self, server: apiserver.ApiServer, broken: Callable[[Any], bool]) -> None:
        self._server, self._broken = server, broken
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kubelets")
        self.least_ready: int | None = None  # workers that were ready at once since it was set to None

    def __enter__(self) -> "Kubelets":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            pods = self._server.get(PODS)["items"]
            for pod in pods:
                self._play(pod)
            workers = [pod for pod in pods if "-worker-" in pod["metadata"]["name"] and "deletionTimestamp" not in pod["metadata"]]
            ready = sum(is_ready(pod) for pod in workers)
            self.least_ready = ready if self.least_ready is None else min(self.least_ready, ready)

    def _play(self, pod: Any) -> None:
        path = f"{PODS}/{pod['metadata']['name']}"
        if "deletionTimestamp" in pod["metadata"]:
            self._server.request("DELETE", path, {"gracePeriodSeconds": 0})
        elif pod["spec"].get("nodeName") and not is_ready(pod) and not self._broken(pod):
            conditions = [one for one in pod["status"].get("conditions", []) if one["type"] != "Ready"]
            conditions.append({"type": "Ready", "status": "True", "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")})
            self._server.request("PATCH", f"{path}/status", {"status": {"phase": "Running", "conditions": conditions}}, MERGE)


def is_ready(pod: Any) -> bool:
    return any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", []))
