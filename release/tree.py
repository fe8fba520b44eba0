"""What a release is made of: the files of one commit, its version and its time."""

import io
import os
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

import yaml

from release.errors import ReleaseFailed


@dataclass(frozen=True, slots=True)
class Tree:
    """The files of a commit in a folder of their own."""

    folder: Path
    commit: str
    version: str
    epoch: int
    """The time of all files of the release, in seconds since 1970: SOURCE_DATE_EPOCH, or that of the commit."""


def export(checkout: Path, folder: Path, commit: str = "HEAD") -> Tree:
    """Write the files of `commit` to `folder`. Files that are not committed are left out. Raises ReleaseFailed."""
    commit = git(checkout, "rev-parse", commit)
    archive = subprocess.run(["git", "archive", "--format=tar", commit], cwd=checkout, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if given and not given.isdecimal():
        raise ReleaseFailed(f"SOURCE_DATE_EPOCH is {given!r}: give whole seconds since 1970, or leave it out")
    return Tree(folder, commit, read_version(folder), int(given or git(checkout, "log", "-1", "--format=%ct", commit)))


def read_version(folder: Path) -> str:
    """Return the version of the package. Raises ReleaseFailed if the chart has another one."""
    version: str = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((folder / "charts" / "fairlead" / "Chart.yaml").read_text())
    for key in ("version", "appVersion"):
        if str(chart[key]) != version:
            raise ReleaseFailed(f"charts/fairlead/Chart.yaml has {key} {chart[key]}, and pyproject.toml has {version}: make them equal")
    return version


def uncommitted(checkout: Path) -> int:
    """Return the number of files that differ from the commit."""
    return len(git(checkout, "status", "--porcelain").splitlines())


def git(checkout: Path, *arguments: str) -> str:
    """Return what git prints. Raises ReleaseFailed."""
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True)
    if done.returncode != 0:
        raise ReleaseFailed(f"`git {' '.join(arguments)}` failed in {checkout}: {done.stderr.strip()}; a release needs a git checkout")
    return done.stdout.strip()
