"""`pvc://CLAIM/PATH`: a model on a volume, mounted read-only into every worker."""

from collections.abc import Iterator

import pytest

from e2e.service import Service
from e2e.system import System, eventually
from e2e.volume import claim

FOLDER = "/tmp/fairlead-e2e-models"


@pytest.fixture
def bound(installed: System) -> Iterator[str]:
    """A claim that is bound to a folder of the node with a copy of the tiny model."""
    copier = Copier(installed)
    copier.run("mkdir -p /volume/family && cp -r /models/tiny /volume/family/")
    with claim(installed, "models", FOLDER) as name:
        yield name
    copier.run("rm -rf /volume/family")


@pytest.mark.long
def test_a_model_on_a_claim_is_served(installed: System, bound: str) -> None:
    service = Service(installed, "claimed")
    with service.running(service.manifest(model={"uri": f"pvc://{bound}/family/tiny"}), replicas=1):
        assert service.chat("From a volume?")["finish"] == "length"


class Copier:
    """Runs a shell command as root on the node's folder, in a namespace that permits it."""

    def __init__(self, system: System) -> None:
        self.system = system

    def run(self, line: str) -> None:
        container = {
            "name": "copier",
            "image": self.system.images.worker,
            "imagePullPolicy": "IfNotPresent",
            "command": ["sh", "-c", line],
            "securityContext": {"runAsUser": 0},
            "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
        }
        spec = {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": "volume", "hostPath": {"path": FOLDER, "type": "DirectoryOrCreate"}}],
        }
        self.system.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "copier", "namespace": "default"}, "spec": spec})
        eventually(lambda: self.system.get("pod", "copier", namespace="default")["status"]["phase"] == "Succeeded", 120, "the copier done")
        self.system.cluster.kubectl("delete", "pod", "copier", "-n", "default", "--grace-period=0", "--force")
