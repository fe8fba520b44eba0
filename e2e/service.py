"""One InferenceService under test: what a user does to it with kubectl, and what they see."""

import time
from typing import Any

from e2e.system import PATIENCE, System, eventually, finished

TINY = "file:///models/tiny"


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

    def ready(self, replicas: int | None = None, seconds: float = 240) -> dict[str, Any]:
        """Waits for Ready=True on the newest generation, with `replicas` ready workers where given."""

        def check() -> Any:
            found = self.system.get("inferenceservices.fairlead.dev", self.name)
            status = found.get("status", {})
            is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
            current = status.get("observedGeneration") == found["metadata"]["generation"]
            counted = replicas is None or status.get("readyReplicas") == replicas == status.get("replicas")
            return status if is_ready and current and counted else None

        return eventually(check, seconds, f"{self.name} Ready with {replicas or 'its'} replicas")

    def pods(self, component: str = "worker") -> list[dict[str, Any]]:
        """Pods that are there and not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return [pod for pod in self.system.get("pods", "-l", selector)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        self.system.cluster.kubectl(
            "scale", f"inferenceservices.fairlead.dev/{self.name}", f"--replicas={replicas}", "-n", self.system.models
        )

    def chat(self, prompt: str, max_tokens: int = 16) -> dict[str, Any]:
        """One streamed chat from the client pod, to its end."""
        return finished(self.system.client("chat.py", self.url, self.name, prompt, str(max_tokens)))

    def delete(self) -> None:
        self.system.cluster.kubectl("delete", "infer", self.name, "-n", self.system.models, "--ignore-not-found", "--timeout=60s")


class Load:
    """Streaming chats from the client pod while the `with` block runs; `outcome` afterwards."""

    def __init__(self, service: Service, concurrency: int = 4, max_tokens: int = 24, seconds: float = 240) -> None:
        self.system = service.system
        self.stop_file = f"/tmp/stop-{service.name}-{time.monotonic_ns()}"
        arguments = [service.url, service.name, f"--concurrency={concurrency}", f"--max-tokens={max_tokens}"]
        self.arguments = [*arguments, f"--seconds={seconds * PATIENCE}", f"--stop-file={self.stop_file}"]
        self.outcome: dict[str, Any] = {}

    def __enter__(self) -> "Load":
        """Returns once the first chat was answered: from then on there is load."""
        self.process = self.system.client("load.py", *self.arguments)
        eventually(self._begun, 60, "the load's first chat")
        return self

    def _begun(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the load ended at once: {self.process.communicate()}")
        return self.system.in_client("test", "-f", f"{self.stop_file}.begun", check=False).returncode == 0

    def __exit__(self, *exception: object) -> None:
        self.system.in_client("touch", self.stop_file)
        self.outcome = finished(self.process)
