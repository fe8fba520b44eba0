"""The one entry point for tests: the first cluster that works, of the caller's KUBECONFIG, kind, and a Kubernetes of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from .local import LocalKubernetes
from .paths import run_root

KEEP = "FAIRLEAD_KEEP_CLUSTER"


class Cluster:
    """A running cluster. This class is one that KUBECONFIG names; the subclasses bring their own."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}

    @staticmethod
    @contextmanager
    def acquire(name: str = "default") -> Iterator[Cluster]:
        """A cluster for the time of a `with` block. One that was up before, or FAIRLEAD_KEEP_CLUSTER=1, stays up afterwards."""
        if os.environ.get("KUBECONFIG"):
            yield Cluster(Path(os.environ["KUBECONFIG"]))
        elif _works("docker", "info") and shutil.which("kind"):
            with KindCluster.acquired(name) as cluster:
                yield cluster
        else:
            with LocalCluster.acquired(name) as cluster:
                yield cluster

    def kubectl(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs kubectl and returns its output as text; `input=` feeds it. With `check`, a failure raises with what kubectl said."""
        return self._client(["kubectl", *arguments], check, options)

    def helm(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs helm, as `kubectl` does."""
        return self._client(["helm", *arguments], check, options)

    def exec_in_netns(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command where the API server's address is reachable (with our own cluster also pods and Services), as subprocess.run does."""
        return subprocess.run(self.command(command), **{"env": self.environment, "text": True, **options})

    def command(self, command: Sequence[str]) -> list[str]:
        """The same, as a command line for subprocess.Popen; use `environment` with it."""
        return list(command)

    def network(self) -> AbstractContextManager[None]:
        """Puts the calling thread into the cluster's network, for clients inside the test process."""
        return nullcontext()

    @property
    def reaches_pods(self) -> bool:
        """Whether `exec_in_netns` and `network` reach pod and Service addresses; otherwise test from pods or through port-forward."""
        return False

    def load_image(self, reference: str) -> None:
        """Makes a local image (images.build) known to the nodes. A caller's own cluster must have it, or be able to pull it."""
        raise NotLoadable(
            f"{reference} cannot be brought into the cluster of KUBECONFIG={self.kubeconfig}: push it to a registry that the cluster pulls from "
            "and pass its name to the tests, or unset KUBECONFIG to let the tests start a cluster of their own."
        )

    def _client(self, command: list[str], check: bool, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        result = self.exec_in_netns(command, capture_output=True, **options)
        if check and result.returncode != 0:
            raise CommandFailed(f"`{' '.join(command)}` failed with code {result.returncode}:\n{result.stdout}{result.stderr}")
        return result


class LocalCluster(Cluster):
    """A Kubernetes of our own in namespaces of its own; see local.py."""

    def __init__(self, kubernetes: LocalKubernetes) -> None:
        super().__init__(kubernetes.kubeconfig)
        self.kubernetes = kubernetes
        self.environment = kubernetes.environment

    @classmethod
    @contextmanager
    def acquired(cls, name: str) -> Iterator[LocalCluster]:
        kubernetes = LocalKubernetes(name)
        was_up = kubernetes.running
        kubernetes.up()
        try:
            yield cls(kubernetes)
        finally:
            if not was_up and not os.environ.get(KEEP):
                kubernetes.down()

    def command(self, command: Sequence[str]) -> list[str]:
        return [*self.kubernetes.machine.inside(), *command]

    def network(self) -> AbstractContextManager[None]:
        return self.kubernetes.machine.network()

    @property
    def reaches_pods(self) -> bool:
        return True

    def load_image(self, reference: str) -> None:
        self.kubernetes.load_image(reference)


class KindCluster(Cluster):
    """Kubernetes in docker, which is what people have."""

    def __init__(self, name: str, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self.name = name

    @classmethod
    @contextmanager
    def acquired(cls, name: str) -> Iterator[KindCluster]:
        node_name = f"fairlead-{name}"
        kubeconfig = run_root() / f"kind-{name}.kubeconfig"
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        was_up = node_name in subprocess.run(["kind", "get", "clusters"], capture_output=True, text=True).stdout.split()
        action = ["export", "kubeconfig"] if was_up else ["create", "cluster", "--wait=120s"]
        subprocess.run(["kind", *action, f"--name={node_name}", f"--kubeconfig={kubeconfig}"], check=True)
        try:
            yield cls(node_name, kubeconfig)
        finally:
            if not was_up and not os.environ.get(KEEP):
                subprocess.run(["kind", "delete", "cluster", f"--name={node_name}", f"--kubeconfig={kubeconfig}"], check=True)
                kubeconfig.unlink(missing_ok=True)

    def load_image(self, reference: str) -> None:
        from . import images

        if images.stored(reference) is None:
            subprocess.run(["kind", "load", "docker-image", f"--name={self.name}", reference], check=True)
            return
        with tempfile.NamedTemporaryFile(suffix=".tar") as archive:
            images.write_archive(reference, set(), archive)
            archive.flush()
            subprocess.run(["kind", "load", "image-archive", f"--name={self.name}", archive.name], check=True)


class CommandFailed(RuntimeError):
    """kubectl or helm failed; the message carries what it said."""


class NotLoadable(RuntimeError):
    """An image cannot be brought into this kind of cluster."""


def _works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0
