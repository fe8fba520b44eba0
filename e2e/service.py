"""One InferenceService under test, used as a user does with kubectl."""

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from e2e.system import HERE, PATIENCE, System, eventually, read_result

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

    @contextmanager
    def running(self, manifest: dict[str, Any], replicas: int | None = None) -> Iterator["Service"]:
        """Apply the manifest and wait for its first workers. The service is deleted after the block, or if they do not become ready."""
        with self.deleted_afterwards():
            self.system.apply(manifest)
            self.wait_ready(replicas=replicas, seconds=300)
            yield self

    @contextmanager
    def deleted_afterwards(self) -> Iterator["Service"]:
        """Delete the service after the block, whatever fails in it."""
        try:
            yield self
        finally:
            self.delete()

    def pods(self, component: str = "worker") -> list[dict[str, Any]]:
        """Return the pods that are not being deleted."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        return [pod for pod in self.system.get("pods", "-l", selector)["items"] if "deletionTimestamp" not in pod["metadata"]]

    def scale(self, replicas: int) -> None:
        self.system.cluster.kubectl(
            "scale", f"inferenceservices.fairlead.dev/{self.name}", f"--replicas={replicas}", "-n", self.system.models
        )

    def chat(self, prompt: str, max_tokens: int = 16, model: str = "", salt: str = "") -> dict[str, Any]:
        """Stream one chat from the client pod to its end, and return its result. `model`: an adapter; empty: the service's model."""
        arguments = [self.url, model or self.name, prompt, str(max_tokens), *([salt] if salt else [])]
        return read_result(self.system.client("chat.py", *arguments))

    def leftovers(self) -> list[str]:
        """Return the objects of every kind in the namespace that are labelled or named as the service's, except Events."""
        listed = self.system.cluster.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").stdout.split()
        kinds = ",".join(sorted(kind for kind in listed if not kind.startswith(("events", "inferenceservices."))))
        found = []
        for entry in self.system.get(kinds)["items"]:
            metadata, kind = entry["metadata"], entry["kind"]
            labelled = metadata.get("labels", {}).get("app.kubernetes.io/instance") == self.name
            if labelled or metadata["name"] == self.name or metadata["name"].startswith(f"{self.name}-"):
                found.append(f"{kind}/{metadata['name']}")
        return found

    def delete(self) -> None:
        timeout = f"--timeout={60 * PATIENCE:.0f}s"
        self.system.cluster.kubectl("delete", "infer", self.name, "-n", self.system.models, "--ignore-not-found", timeout)


class Load:
    """Streams chats from the client pod while the `with` block runs, whether the API server answers or not. `outcome` is set afterwards."""

    def __init__(
        self, service: Service, concurrency: int = 4, max_tokens: int = 24, url: str = "", longest: float = LONGEST_LOAD * PATIENCE
    ) -> None:
        """`url`: where the requests go; empty: to the service's routers. `longest`: seconds after which the load stops by itself."""
        self.system, self.concurrency = service.system, concurrency
        self.files = f"/tmp/load-{service.name}-{time.monotonic_ns()}"
        arguments = [url or service.url, service.name, f"--concurrency={concurrency}", f"--max-tokens={max_tokens}"]
        self.arguments = [*arguments, f"--seconds={longest}", f"--stop-file={self.files}.stop"]
        self.outcome: dict[str, Any] = {}

    def __enter__(self) -> "Load":
        """Return when the first chat has been answered."""
        program = shlex.join(["python", f"{self.files}.py", *self.arguments])
        run = f"{program} > {self.files}.out 2> {self.files}.err; echo $? > {self.files}.code"
        # In a session of its own: `kubectl exec` ends at once, and a lost API server does not end the load.
        start = f"cat > {self.files}.py; setsid sh -c {shlex.quote(run)} > /dev/null 2>&1 < /dev/null &"
        exec_in_client = ["exec", "-i", "-n", self.system.models, "client", "--"]
        self.system.cluster.kubectl(*exec_in_client, "sh", "-c", start, input=(HERE / "client" / "load.py").read_text())
        eventually(lambda: self._has("stop.started") or self._has("code"), 60, "the load's first chat")
        assert not self._has("code"), f"the load ended before its first chat: {self._read('err')}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        ended = self._has("code")
        self.system.in_client("touch", f"{self.files}.stop")
        eventually(lambda: self._has("code"), 240, "the end of the load")
        assert self._read("code").strip() == "0", self._read("err")
        self.outcome = json.loads(self._read("out").strip().splitlines()[-1])
        assert not ended or error, f"the load ended before the action under it: {self.outcome}"

    def assert_answered(self, at_least: int = 0) -> None:
        """Fail if a request failed, or if fewer than `at_least` were sent (0: two for each concurrent client)."""
        assert self.outcome["failed"] == 0, self.outcome["failures"]
        wanted = at_least or 2 * self.concurrency
        assert self.outcome["requests"] >= wanted, f"only {self.outcome['requests']} of at least {wanted} requests were sent"

    def _has(self, name: str) -> bool:
        return self.system.in_client("test", "-f", f"{self.files}.{name}", check=False).returncode == 0

    def _read(self, name: str) -> str:
        return self.system.in_client("cat", f"{self.files}.{name}").stdout
