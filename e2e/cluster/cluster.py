"""The entry point for tests: the cluster of KUBECONFIG, a kind cluster, or a Kubernetes on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from e2e import progress

from . import images
from .local import LocalKubernetes
from .paths import CHECKOUT, cache_root, content_key, locked, run_root

KEEP = "FAIRLEAD_KEEP_CLUSTER"
REPOSITORY = "FAIRLEAD_IMAGES"


class CommandFailed(RuntimeError):
    """kubectl or helm failed. The message contains its output."""


class NotLoadable(RuntimeError):
    """An image cannot be loaded into this kind of cluster."""


class Cluster:
    """A running cluster: the one that KUBECONFIG names. The subclasses start their own."""

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self.environment = {**os.environ, "KUBECONFIG": str(kubeconfig)}

    @staticmethod
    @contextmanager
    def acquire(name: str = "default") -> Iterator[Cluster]:
        """Provide a cluster while the context lasts. No other process uses a cluster that runs on this machine.

        A cluster that `python -m e2e.cluster up` started keeps running afterwards. FAIRLEAD_KEEP_CLUSTER=1 keeps any cluster.
        """
        if os.environ.get("KUBECONFIG"):
            yield Cluster(Path(os.environ["KUBECONFIG"]))
        elif shutil.which("kind") and _works("docker", "info"):
            with KindCluster.start(name) as cluster:
                yield cluster
        else:
            with LocalCluster.start(name) as cluster:
                yield cluster

    def kubectl(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run kubectl with `input` as its standard input, and return its output as text. With `check`, a failure raises CommandFailed."""
        return self._client(["kubectl", *arguments], check, options)

    def helm(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run helm, as `kubectl` does."""
        return self._client(["helm", *arguments], check, options)

    def exec_in_netns(self, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command, as subprocess.run does, where it reaches the API server (and pods and Services: see `reaches_pods`)."""
        return subprocess.run(self.command(command), **{"env": self.environment, "text": True, **options})

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command line of `exec_in_netns` for subprocess.Popen. Use it with `environment`."""
        return list(command)

    def network(self) -> AbstractContextManager[None]:
        """Move the calling thread, and what it starts meanwhile, into the cluster's network, for clients inside the test process."""
        return nullcontext()

    @property
    def reaches_pods(self) -> bool:
        """Whether `exec_in_netns` and `network` reach addresses of pods and Services. If not, test from pods or through port-forward."""
        return False

    def base_image(self) -> str:
        """Return a small image with Python 3.11 that the nodes have or can pull."""
        return "docker.io/library/python:3.11-slim-bookworm"

    def add_image(self, name: str, containerfile: Path, sources: Iterable[str], base_image: str | None = None) -> str:
        """Build an image of `sources` (paths in the checkout), load it onto the nodes, and return its reference.

        `base_image`: a reference that this method returned; None: the Containerfile's own default. An unchanged image is not built again.
        The cluster of KUBECONFIG pulls the image, from the repository that FAIRLEAD_IMAGES names.
        """
        repository = os.environ.get(REPOSITORY)
        if repository is None:
            raise NotLoadable(
                f"{name} cannot be loaded into the cluster of KUBECONFIG={self.kubeconfig}. Push the images to a registry that it pulls "
                f"from and set {REPOSITORY} (registry.example/me for registry.example/me/{name}:latest), or unset KUBECONFIG."
            )
        return f"{repository}/{name}:latest"

    def _client(self, command: list[str], check: bool, options: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        result = self.exec_in_netns(command, capture_output=True, **options)
        if check and result.returncode != 0:
            raise CommandFailed(f"`{' '.join(command)}` failed with code {result.returncode}:\n{result.stdout}{result.stderr}")
        return result


class LocalCluster(Cluster):
    """A Kubernetes on this machine, in its own namespaces (local.py)."""

    def __init__(self, kubernetes: LocalKubernetes) -> None:
        super().__init__(kubernetes.kubeconfig)
        self.kubernetes = kubernetes
        self.environment = kubernetes.environment

    @classmethod
    @contextmanager
    def start(cls, name: str) -> Iterator[LocalCluster]:
        kubernetes = LocalKubernetes(name)
        with locked(cache_root() / "locks" / f"{name}-in-use", "wait for another run that uses the cluster"):
            if not kubernetes.kept:
                kubernetes.down()  # it belongs to a run that was killed, and so do its objects
            kubernetes.up(keep=kubernetes.kept or bool(os.environ.get(KEEP)))
            try:
                yield cls(kubernetes)
            finally:
                if not kubernetes.kept:
                    kubernetes.down()

    def base_image(self) -> str:
        reference = images.base()
        self.load_image(reference)
        return reference

    def command(self, command: Sequence[str]) -> list[str]:
        return [*self.kubernetes.machine.inside(), *command]

    def network(self) -> AbstractContextManager[None]:
        return self.kubernetes.machine.network()

    @property
    def reaches_pods(self) -> bool:
        return True

    def add_image(self, name: str, containerfile: Path, sources: Iterable[str], base_image: str | None = None) -> str:
        reference = images.build(name, containerfile, sources, base_image=base_image)
        self.load_image(reference)
        return reference

    def load_image(self, reference: str) -> None:
        """Load an image that images.build made onto the node."""
        self.kubernetes.load_image(reference)


class KindCluster(Cluster):
    """Kubernetes in docker."""

    def __init__(self, name: str, kubeconfig: Path) -> None:
        super().__init__(kubeconfig)
        self.name = name

    @classmethod
    @contextmanager
    def start(cls, name: str) -> Iterator[KindCluster]:
        name = f"fairlead-{name}"
        kubeconfig = run_root() / f"{name}.kubeconfig"
        kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        was_up = name in subprocess.run(["kind", "get", "clusters"], capture_output=True, text=True).stdout.split()
        action = ["export", "kubeconfig"] if was_up else ["create", "cluster", "--wait=120s"]
        with progress.step(f"kind {' '.join(action[:2])} {name}"):
            subprocess.run(["kind", *action, f"--name={name}", f"--kubeconfig={kubeconfig}"], check=True)
        try:
            yield cls(name, kubeconfig)
        finally:
            if not was_up and not os.environ.get(KEEP):
                subprocess.run(["kind", "delete", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}"], check=True)
                kubeconfig.unlink(missing_ok=True)

    def add_image(self, name: str, containerfile: Path, sources: Iterable[str], base_image: str | None = None) -> str:
        files = {source: CHECKOUT / source for source in sources}
        reference = f"localhost/{name}:{content_key(name, base_image or '', *images.contents(containerfile, files))}"
        arguments = ["--build-arg", f"BASE={base_image}"] if base_image else []
        if not _works("docker", "image", "inspect", reference):
            with images.build_context(containerfile.read_text(), files) as context, progress.step(f"docker build {reference}"):
                subprocess.run(
                    ["docker", "build", *arguments, "-t", reference, "-f", str(context / "Containerfile"), str(context)], check=True
                )
        with progress.step(f"kind load {reference}"):
            subprocess.run(["kind", "load", "docker-image", f"--name={self.name}", reference], check=True)
        return reference


def _works(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True).returncode == 0
