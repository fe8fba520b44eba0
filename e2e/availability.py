"""The lowest number of ready workers during an action."""

import json
import subprocess
import threading
from types import TracebackType
from typing import Any
from urllib.parse import quote

from e2e.service import Service
from e2e.system import eventually


class Availability:
    """Counts the ready worker pods at every change that the API server knows of, while the `with` block runs.

    A watch misses no state, as polls do. The block fails if the watch ends early.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ready: dict[str, bool] = {}
        self._version = 0
        self.fewest = 0

    def __enter__(self) -> "Availability":
        listed = self._list()
        self._ready = {pod["metadata"]["name"]: is_ready(pod) for pod in listed["items"]}
        self._version = int(listed["metadata"]["resourceVersion"])
        self.fewest = sum(self._ready.values())
        cluster = self._service.system.cluster
        path = f"{self._path}&watch=true&resourceVersion={self._version}"
        command = cluster.command(["kubectl", "get", "--raw", path])
        self._watch = subprocess.Popen(command, env=cluster.environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                newest = max((int(pod["metadata"]["resourceVersion"]) for pod in self._list()["items"]), default=0)
                eventually(lambda: self._version >= newest or not self._thread.is_alive(), 30, "the newest state seen by the watch")
                assert self._thread.is_alive(), f"the watch of the pods ended early: {self._watch.communicate()[1]}"
        finally:
            self._watch.kill()
            self._thread.join(30)

    @property
    def _path(self) -> str:
        selector = f"app.kubernetes.io/instance={self._service.name},app.kubernetes.io/component=worker"
        return f"/api/v1/namespaces/{self._service.system.models}/pods?labelSelector={quote(selector)}"

    def _list(self) -> dict[str, Any]:
        return json.loads(self._service.system.cluster.kubectl("get", "--raw", self._path).stdout)

    def _follow(self) -> None:
        assert self._watch.stdout is not None
        for line in self._watch.stdout:
            event = json.loads(line)
            pod = event["object"]
            if event["type"] == "ERROR":
                return
            self._ready[pod["metadata"]["name"]] = event["type"] != "DELETED" and is_ready(pod)
            self.fewest = min(self.fewest, sum(self._ready.values()))
            self._version = int(pod["metadata"]["resourceVersion"])


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether the pod is Ready and is not being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    ready = any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]
