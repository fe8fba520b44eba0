"""One InferenceService under test, used as a user does with kubectl."""

import time
from typing import Any

from e2e.system import PATIENCE, System, eventually, read_result

TINY = "file:///models/tiny"
LONGEST_LOAD = 1800.0  # seconds after which a load stops by itself: longer than any test


class Service:
    """`kubectl apply`, `get infer`, `scale`, `delete` for one service."""

    def __init__(self, system: System, name: str) -> None:
        self.system = system
        self.name = name
        self.url = f"http://{name}.{system.models}.svc/v1"

    def manifest(self, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "fairlead.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": self.name, "namespace": self.system.models},
            "spec": {"model": {"uri": TINY}, **spec},
        }

    def status(self) -> dict[str, Any]:
        return self.system.get("inferenceservices.fairlead.dev", self.name).get("status", {})

    def condition(self, kind: str) -> dict[str, Any]:
        found = [entry for entry in self.status().get("conditions", []) if entry["type"] == kind]
        return found[0] if found else {}

    def wait_ready(self, replicas: int | None = None, seconds: float = 240) -> dict[str, Any]:
        """Wait until the newest generation is Ready and no step is under way, with exactly `replicas` workers if given.

        Returns the status. A service is Ready as soon as one worker serves, and most tests count on all of them.
        """

        def check() -> Any:
            found = self.system.get("inferenceservices.fairlead.dev", self.name)
            status = found.get("status", {})
            conditions = {c["type"]: c for c in status.get("conditions", [])}
            is_ready = conditions.get("Ready", {}).get("status") == "True" and conditions["Progressing"]["reason"] == "Complete"
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            counted = replicas is None or status.get("readyReplicas") == replicas == status.get("replicas")
            return status if is_ready and current and counted else None

        return eventually(check, seconds, f"{self.name} Ready with {replicas or 'its'} replicas")

    def pods(self, component: str = "worker") -> list[dict[str, Any]]:
        """Return the pods that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return [pod for pod in self.system.get("pods", "-l", selector)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        self.system.cluster.kubectl(
            "scale", f"inferenceservices.fairlead.dev/{self.name}", f"--replicas={replicas}", "-n", self.system.models
        )

    def chat(self, prompt: str, max_tokens: int = 16) -> dict[str, Any]:
        """Stream one chat from the client pod to its end, and return its result."""
        return read_result(self.system.client("chat.py", self.url, self.name, prompt, str(max_tokens)))

    def delete(self) -> None:
        self.system.cluster.kubectl("delete", "infer", self.name, "-n", self.system.models, "--ignore-not-found", "--timeout=60s")


class Load:
    """Streams chats from the client pod while the `with` block runs. `outcome` is set afterwards."""

    def __init__(self, service: Service, concurrency: int = 4, max_tokens: int = 24) -> None:
        self.system = service.system
        self.stop_file = f"/tmp/stop-{service.name}-{time.monotonic_ns()}"
        arguments = [service.url, service.name, f"--concurrency={concurrency}", f"--max-tokens={max_tokens}"]
        self.arguments = [*arguments, f"--seconds={LONGEST_LOAD * PATIENCE}", f"--stop-file={self.stop_file}"]
        self.outcome: dict[str, Any] = {}

    def __enter__(self) -> "Load":
        """Return when the first chat has been answered."""
        self.process = self.system.client("load.py", *self.arguments)
        eventually(self._has_started, 60, "the load's first chat")
        return self

    def _has_started(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the load ended before its first chat: {self.process.communicate()}")
        return self.system.in_client("test", "-f", f"{self.stop_file}.started", check=False).returncode == 0

    def __exit__(self, *exception: object) -> None:
        ended = self.process.poll() is not None
        self.system.in_client("touch", self.stop_file)
        self.outcome = read_result(self.process)
        assert not ended, f"the load ended before the action under it: {self.outcome}"
