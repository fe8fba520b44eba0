"""The push of a release, rehearsed: to a registry on loopback and back, with the programs that push it to a public one."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.operator.support.apiserver import program

from release.errors import Missing, ReleaseFailed

PREFIX = "fairlead"
"""Path of the artifacts in the registry."""
SECONDS = 300


def push(layout: Path, repository: str, registry: str, version: str) -> None:
    """Push an artifact of a layout with skopeo. Raises Missing or ReleaseFailed."""
    _skopeo("--dest-tls-verify=false", f"oci:{layout}:{repository}", f"docker://{registry}/{PREFIX}/{repository}:{version}")


def pull(registry: str, repository: str, version: str, target: Path) -> str:
    """Pull an artifact with skopeo into a new layout, and return the digest of its manifest. Raises Missing or ReleaseFailed."""
    _skopeo("--src-tls-verify=false", f"docker://{registry}/{PREFIX}/{repository}:{version}", f"oci:{target}:{repository}")
    (manifest,) = json.loads((target / "index.json").read_text())["manifests"]
    return str(manifest["digest"])


def compare(pushed: Path, pulled: Path, wanted: str, found: str) -> int:
    """Return the number of blobs that came back with the right bytes. Raises ReleaseFailed if a digest is not that of its bytes."""
    if found != wanted:
        raise ReleaseFailed(f"the registry returned {found}, and {wanted} was pushed")
    blobs = sorted((pulled / "blobs" / "sha256").iterdir())
    for blob in blobs:
        if hashlib.sha256(blob.read_bytes()).hexdigest() != blob.name or not (pushed / "blobs" / "sha256" / blob.name).exists():
            raise ReleaseFailed(f"blob {blob.name} is not what was pushed")
    return len(blobs)


def rehearse(layout: Path, manifests: Mapping[str, str], version: str, registry: str, work: Path) -> list[str]:
    """Push all artifacts to `registry`, pull them back and compare. Return a line for each. Raises Missing or ReleaseFailed."""
    lines = []
    for repository, digest in manifests.items():
        push(layout, repository, registry, version)
        target = work / repository.replace("/", "-")
        count = compare(layout, target, digest, pull(registry, repository, version, target))
        lines.append(f"{PREFIX}/{repository}:{version}  {digest}  ({count} blobs, equal after push and pull)")
    return lines


def pull_chart(registry: str, version: str, chart: Path, work: Path) -> str:
    """Pull the chart with helm, as a user does, and return a line about it. Raises Missing or ReleaseFailed."""
    helm = program("helm")
    if helm is None:
        raise Missing("helm, to pull the chart as a user does: run `make kubernetes`, or install helm")
    source = f"oci://{registry}/{PREFIX}/charts/fairlead"
    _run([str(helm), "pull", source, "--version", version, "--plain-http", "--destination", str(work)])
    if (work / chart.name).read_bytes() != chart.read_bytes():
        raise ReleaseFailed(f"helm pulled another {chart.name} than was pushed")
    return f"helm pull {source} --version {version}: the same bytes"


def _skopeo(*arguments: str) -> None:
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        raise Missing("skopeo, which pushes and pulls OCI artifacts: install the package skopeo")
    _run([skopeo, "--insecure-policy", "copy", "--quiet", "--preserve-digests", *arguments])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode != 0:
        raise ReleaseFailed(f"`{' '.join(command)}` failed: {(done.stderr.strip() or done.stdout.strip())[-1000:]}")
