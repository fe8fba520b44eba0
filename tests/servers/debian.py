"""Programs from Debian's packages in a folder of the user's cache. The system is not changed, and the release of Debian does not matter.

A program is unpacked with the libraries of its own release, and runs with that release's loader.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead"


def unpack(folder: Path, script: str, suite: str, packages: Sequence[str], program: str, mirror: str) -> None:
    """Unpack the packages to `folder`/root and write `folder`/`script`, which runs `program`.

    Raises OSError, StopIteration or SubprocessError, and leaves no partial installation.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as name:
        work = Path(name)
        for part in ("lists/partial", "cache/archives/partial", "debs", "root"):
            (work / part).mkdir(parents=True)
        suites = [suite, "bookworm"] if suite == "bookworm-backports" else [suite]  # the libraries are in the release itself
        (work / "status").touch()  # an empty package status: apt sees nothing as installed
        (work / "sources.list").write_text("".join(f"deb [signed-by={KEYRING}] {mirror} {each} main\n" for each in suites))
        places = {
            "State::Lists": "lists",
            "State::status": "status",
            "Cache": "cache",
            "Etc::SourceList": "sources.list",
            "Etc::SourceParts": "none",
        }
        options = [part for key, value in places.items() for part in ("-o", f"Dir::{key}={work / value}")]
        options += ["-o", f"Dir::Etc::Preferences={work}/none", "-o", "Acquire::Languages=none", "-o", "APT::Sandbox::User=", "-qq"]
        for command in (["update"], ["download", *packages]):
            subprocess.run(["apt-get", *options, *command], cwd=work / "debs", check=True, timeout=120, stdin=subprocess.DEVNULL)
        for package in (work / "debs").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True, timeout=60)
        libraries = f"usr/lib/{platform.machine()}-linux-gnu"
        loader = next(path for path in (work / "root").rglob("ld-linux-*.so.*"))
        inside = loader.relative_to(work / "root")
        launcher = work / script
        launcher.write_text(
            '#!/bin/sh\nroot="$(dirname "$0")/root"\n'
            f'exec "$root/{inside}" --library-path "$root/{libraries}:$root/{libraries[4:]}" "$root/usr/bin/{program}" "$@"\n'
        )
        launcher.chmod(0o755)
        subprocess.run([launcher, "--version"], check=True, timeout=10, stdout=subprocess.DEVNULL)
        for leftover in ("lists", "cache", "debs"):
            shutil.rmtree(work / leftover)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for part in ("root", script):
            (work / part).rename(folder / part)


def debian_mirror() -> str:
    """Return the mirror from which this machine's apt gets Debian; empty if there is none."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split() if shutil.which("apt-get") else []
    return next((uri for uri in found if uri.rstrip("/").endswith("/debian")), "")
