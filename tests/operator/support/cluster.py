"""One namespace of an API server, and what a controller or a kubelet would write there: no node runs."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from tests.operator.support.apiserver import ApiServer
from tests.operator.support.manifests import manifest

from fairlead_operator.api.crd import custom_resource_definition, profile_definition

T = TypeVar("T")
MERGE = "application/merge-patch+json"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def install_crds(server: ApiServer) -> None:
    """Create our CRDs, and wait until they are served."""
    for crd in (custom_resource_definition(), profile_definition()):
        server.create(CRDS, crd)
    wait_for_crds(server)


def wait_for_crds(server: ApiServer) -> None:
    """Wait until the API server serves each of our CRDs that it has."""
    deadline = time.monotonic() + 30
    for crd in server.get(CRDS)["items"]:
        if crd["spec"]["group"] == "fairlead.dev":
            while server.request("GET", f"/apis/fairlead.dev/v1alpha1/{crd['spec']['names']['plural']}")[0] != 200:
                assert time.monotonic() < deadline, f"CRD {crd['metadata']['name']} was accepted and is not served"
                time.sleep(0.05)


class Cluster:
    """One namespace, with the InferenceService `qwen` and its children."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self.server, self.namespace = server, namespace

    def path(self, plural: str, name: str = "", subresource: str = "") -> str:
        prefix = {
            "deployments": "/apis/apps/v1",
            "controllerrevisions": "/apis/apps/v1",
            "poddisruptionbudgets": "/apis/policy/v1",
            "inferenceservices": "/apis/fairlead.dev/v1alpha1",
        }.get(plural, "/api/v1")
        return "/".join(part for part in (f"{prefix}/namespaces/{self.namespace}/{plural}", name, subresource) if part)

    def create(self, **spec: Any) -> Any:
        return self.server.create(self.path("inferenceservices"), manifest("qwen", self.namespace, **spec))

    def get(self, plural: str, name: str) -> Any:
        return self.server.get(self.path(plural, name))

    def patch(self, plural: str, name: str, patch: Any, subresource: str = "") -> Any:
        code, answer = self.server.request("PATCH", self.path(plural, name, subresource), patch, MERGE)
        assert code == 200, answer
        return answer

    def ready(self) -> Any:
        """Return the Ready condition; empty: there is none."""
        return self.condition("Ready")

    def condition(self, type_: str) -> Any:
        """Return a condition of the service; empty: there is none."""
        status = self.get("inferenceservices", "qwen").get("status") or {}
        return next((one for one in status.get("conditions", []) if one["type"] == type_), {})

    def play_controllers(self, *, workers_ready: bool = True) -> None:
        """Write the Deployments' status, with all pods ready, or without a ready worker."""
        for name in ("qwen-worker", "qwen-router"):
            deployment = eventually(lambda name=name: self.get("deployments", name))
            count = deployment["spec"]["replicas"]
            ready = count if workers_ready or name == "qwen-router" else 0
            status = {"observedGeneration": deployment["metadata"]["generation"], "replicas": count, "updatedReplicas": count}
            self.patch("deployments", name, {"status": {**status, "readyReplicas": ready, "availableReplicas": ready}}, "status")

    def play_kubelet(self, name: str, status: dict[str, Any], component: str = "worker") -> None:
        """Write the status of a pod, and create the pod if there is none."""
        if self.get("pods", name) is None:
            labels = eventually(lambda: self.get("deployments", f"qwen-{component}"))["spec"]["template"]["metadata"]["labels"]
            spec = {"containers": [{"name": "worker", "image": "worker:1"}], "automountServiceAccountToken": False}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
            self.server.create(self.path("pods"), pod)
        self.patch("pods", name, {"status": status}, "status")


def eventually(look: Callable[[], T], within: float = 45.0, pause: float = 0.05) -> T:
    """Call `look`, every `pause` seconds, until its result is true, and return that. The failure contains the last result."""
    deadline = time.monotonic() + within
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < deadline, f"still {found!r} after {within} s"
        time.sleep(pause)


CHILDREN = [
    ("serviceaccounts", "qwen"),
    ("services", "qwen"),
    ("services", "qwen-workers"),
    ("deployments", "qwen-worker"),
    ("deployments", "qwen-router"),
    ("poddisruptionbudgets", "qwen-worker"),
    ("poddisruptionbudgets", "qwen-router"),
]
