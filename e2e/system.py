"""Fairlead in a cluster, installed as a user does: images, Helm chart, a namespace for services, and a client pod."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, images

PATIENCE = float(os.environ.get("FAIRLEAD_PATIENCE", "1"))  # factor of all timeouts, for a busy machine
HERE = Path(__file__).parent
CHECKOUT = HERE.parent
CONTROL_SOURCES = (
    "pyproject.toml",
    "hatch_build.py",
    "README.md",
    "LICENSE",
    "requirements/control.txt",
    "requirements/build.txt",
    *images.PACKAGES,
)


@dataclass(frozen=True)
class Images:
    """References of the images on the nodes."""

    worker: str
    control: str
    client: str
    redis: str

    @classmethod
    def build(cls, cluster: Cluster) -> "Images":
        """Build changed images and load them onto the nodes. The first build on a machine takes minutes (torch), a code change seconds."""
        base = cluster.base_image()
        worker = cluster.add_image("fairlead-worker", CHECKOUT / "images" / "Containerfile.worker", images.WORKER_SOURCES)
        return cls(
            worker=cluster.add_image("fairlead-worker-tiny", HERE / "images" / "Containerfile.model", [], base_image=worker),
            control=cluster.add_image("fairlead-control", CHECKOUT / "images" / "Containerfile.control", CONTROL_SOURCES),
            client=cluster.add_image("fairlead-client", HERE / "images" / "Containerfile.client", ["e2e/client/requirements.txt"]),
            redis=base,
        )


class System:
    """The installed product and the client pod."""

    namespace = "fairlead-system"
    models = "models"
    redis = "fairlead-redis.fairlead-system.svc.cluster.local"  # the name in its certificate

    def __init__(self, cluster: Cluster, built: Images) -> None:
        self.cluster = cluster
        self.images = built

    def prepare(self) -> None:
        """Create the namespaces and the client pod. Both namespaces enforce the restricted Pod Security Standard."""
        for namespace in (self.namespace, self.models):
            self.apply(
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {"name": namespace, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
                }
            )
        self.apply(client_pod(self.models, self.images.client))

    def install(self, **changed: Any) -> None:
        """Run `helm upgrade --install` without waiting for the operator. `changed`: top-level values."""
        values: dict[str, Any] = {
            "images": self.image_values(self.images),
            "defaults": {"gpus": 0},
            **changed,
        }
        self.cluster.helm(
            "upgrade",
            "--install",
            "fairlead",
            str(CHECKOUT / "charts" / "fairlead"),
            "-n",
            self.namespace,
            "-f",
            "-",
            input=json.dumps(values),
        )

    @staticmethod
    def image_values(built: Images) -> dict[str, Any]:
        """Return the chart's value `images`."""
        named = {name: image_values(getattr(built, name)) for name in ("worker", "control", "redis")}
        return {**named, "pullPolicy": "IfNotPresent"}

    def remove(self) -> None:
        """Uninstall the chart, and delete what `prepare` created: a cluster that keeps running is left clean."""
        self.cluster.kubectl("delete", "infer", "--all", "-n", self.models, "--ignore-not-found", "--timeout=60s", check=False)
        self.cluster.helm("uninstall", "fairlead", "-n", self.namespace, "--ignore-not-found", check=False)
        self.cluster.kubectl("delete", "namespace", self.models, self.namespace, "--ignore-not-found", "--timeout=120s", check=False)

    def apply(self, *objects: dict[str, Any], check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("apply", "-f", "-", check=check, input="\n---\n".join(json.dumps(entry) for entry in objects))

    def get(self, *arguments: str, namespace: str | None = None) -> dict[str, Any]:
        """Return the result of `kubectl get … -o json`."""
        return json.loads(self.cluster.kubectl("get", *arguments, "-n", namespace or self.models, "-o", "json").stdout)

    def client(self, script: str, *arguments: str) -> "subprocess.Popen[str]":
        """Start one of e2e/client/*.py in the client pod."""
        command = ["kubectl", "exec", "-i", "-n", self.models, "client", "--", "python", "-", *arguments]
        process = subprocess.Popen(
            self.cluster.command(command),
            env=self.cluster.environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin
        process.stdin.write((HERE / "client" / script).read_text())
        process.stdin.close()
        process.stdin = None
        return process

    def in_client(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("exec", "-n", self.models, "client", "--", *command, check=check)


def image_values(reference: str) -> dict[str, str]:
    """Return an image reference as values of the chart."""
    repository, tag = reference.rsplit(":", 1)
    return {"repository": repository, "tag": tag}


def client_pod(namespace: str, image: str) -> dict[str, Any]:
    """Return a restricted pod that sleeps, in which clients run."""
    container = {
        "name": "client",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "client", "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }


def read_result(process: "subprocess.Popen[str]", seconds: float = 240) -> dict[str, Any]:
    """Return the JSON that a client script printed last. Fails with its standard error."""
    out, errors = process.communicate(timeout=seconds * PATIENCE)
    assert process.returncode == 0, f"the client ended with code {process.returncode}:\n{out}{errors}"
    return json.loads(out.strip().splitlines()[-1])


def eventually(check: Any, seconds: float, what: str) -> Any:
    """Call `check` until its result is true, and return that. The failure contains its last result or exception."""
    seconds *= PATIENCE
    deadline = time.monotonic() + seconds
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = check()
            if last:
                return last
        except Exception as error:  # reported below if it does not pass
            last = error
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {what}; last seen: {last!r}")
