"""Fairlead installed in a cluster as a user would: images, Helm chart, a namespace for services, and a pod to call them from."""

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import Cluster, images

PATIENCE = float(os.environ.get("FAIRLEAD_PATIENCE", "1"))  # times as long as on an idle machine: on one with much else to do
HERE = Path(__file__).parent
CHECKOUT = HERE.parent
CONTROL_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "requirements/control.txt", *images.PACKAGES)


@dataclass(frozen=True)
class Images:
    """References as the nodes know them."""

    worker: str
    control: str
    client: str
    redis: str

    @classmethod
    def on(cls, cluster: Cluster) -> "Images":
        """Builds what has changed and brings it to the nodes; a machine's first build takes minutes (torch), a change of code seconds."""
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
        """Namespaces and the client pod. Both namespaces enforce the restricted Pod Security Standard."""
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
        """`helm install` or `helm upgrade`, and nothing more: it does not wait for the operator. `changed`: top-level values."""
        values: dict[str, Any] = {
            "images": {
                "worker": parts(self.images.worker),
                "control": parts(self.images.control),
                "redis": parts(self.images.redis),
                "pullPolicy": "IfNotPresent",
            },
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

    def remove(self) -> None:
        """Uninstalls and deletes what `prepare` made; a cluster that is kept is left clean."""
        self.cluster.kubectl("delete", "infer", "--all", "-n", self.models, "--ignore-not-found", "--timeout=60s", check=False)
        self.cluster.helm("uninstall", "fairlead", "-n", self.namespace, "--ignore-not-found", check=False)
        self.cluster.kubectl("delete", "namespace", self.models, self.namespace, "--ignore-not-found", "--timeout=120s", check=False)

    def apply(self, *objects: dict[str, Any], check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("apply", "-f", "-", check=check, input="\n---\n".join(json.dumps(entry) for entry in objects))

    def get(self, *arguments: str, namespace: str | None = None) -> dict[str, Any]:
        """`kubectl get … -o json`."""
        return json.loads(self.cluster.kubectl("get", *arguments, "-n", namespace or self.models, "-o", "json").stdout)

    def client(self, script: str, *arguments: str) -> "subprocess.Popen[str]":
        """Starts one of e2e/client/*.py in the client pod."""
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


def parts(reference: str) -> dict[str, str]:
    """An image reference as the chart wants it."""
    repository, tag = reference.rsplit(":", 1)
    return {"repository": repository, "tag": tag}


def client_pod(namespace: str, image: str) -> dict[str, Any]:
    """A restricted pod that only sleeps, to run clients in."""
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


def finished(process: "subprocess.Popen[str]", seconds: float = 240) -> dict[str, Any]:
    """The JSON that a client script printed last; fails with what it said on standard error."""
    out, errors = process.communicate(timeout=seconds * PATIENCE)
    assert process.returncode == 0, f"the client ended with code {process.returncode}:\n{out}{errors}"
    return json.loads(out.strip().splitlines()[-1])


def eventually(check: Any, seconds: float, what: str) -> Any:
    """Calls `check` until it returns something true; its last answer or exception is in the failure."""
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
