"""Wheel, source distribution and bills of materials, by the tools that make them."""

import os
import subprocess
import sys
from pathlib import Path

from release.archives import IMAGES
from release.errors import ReleaseFailed
from release.tree import Tree

UV = Path(sys.executable).with_name("uv")
SBOM_TOOL = "cyclonedx-bom==7.5.0"
SECONDS = 600
"""For one command. The first one downloads its tool."""


def build_packages(tree: Tree, target: Path, allow_pure: bool = False) -> list[Path]:
    """Build the source distribution, and the wheel from it, with the pinned build backend. Raises ReleaseFailed.

    `allow_pure`: accept a wheel without native kernels.
    """
    pins = tree.folder / "requirements" / "build.txt"
    flags = ["--quiet", "--build-constraints", str(pins), "--require-hashes", "--no-create-gitignore", "--python", sys.executable]
    _run([str(UV), "build", *flags, "--out-dir", str(target), str(tree.folder)], tree, "wheel and sdist")
    packages = sorted(path for path in target.iterdir() if path.name.endswith((".whl", ".tar.gz")))
    for wheel in (path for path in packages if path.suffix == ".whl"):
        check_wheel(wheel.name, allow_pure)
    return packages


def check_wheel(name: str, allow_pure: bool) -> None:
    """Raise ReleaseFailed if the tag of a wheel says that it has no native kernels, or that package indexes refuse it.

    The build backend only warns, for users' own builds.
    """
    if name.endswith("-any.whl") and not allow_pure:
        raise ReleaseFailed(
            f"{name} has no native kernels, and CPUs would compute with torch alone: install gcc and build on x86_64 or aarch64, "
            "or give --allow-pure-wheel"
        )
    if "-linux_" in name:
        raise ReleaseFailed(f"{name}: package indexes accept manylinux tags, not this one; build with gcc on Linux with glibc")


def write_sboms(tree: Tree, target: Path) -> list[Path]:
    """Write a CycloneDX bill of materials of each image's Python packages. Raises ReleaseFailed."""
    written = []
    for image in IMAGES:
        path = target / f"sbom-{image}-{tree.version}.cdx.json"
        tool = [str(UV), "tool", "run", "--quiet", "--python", sys.executable, "--from", SBOM_TOOL]
        pins = tree.folder / "requirements" / f"{image}.txt"
        flags = ["--output-reproducible", "--pyproject", str(tree.folder / "pyproject.toml"), "-o", str(path)]
        _run([*tool, "cyclonedx-py", "requirements", *flags, str(pins)], tree, path.name)
        written.append(path)
    return written


def _run(command: list[str], tree: Tree, what: str) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(tree.epoch), "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, cwd=tree.folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ReleaseFailed(f"{what}: {error}") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-12:])
        raise ReleaseFailed(f"{what}: `{' '.join(command[:4])} ...` failed with {done.returncode} (a package index is needed):\n{tail}")
