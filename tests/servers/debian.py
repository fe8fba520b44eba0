"""Programs from Debian's packages in a folder of the user's cache. The system is not changed, and the release of Debian does not matter.

A server is unpacked with the libraries of its own release, and runs with that release's loader. Another program can bring its own launcher.
"""

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead"


def unpack(folder: Path, script: str, suite: str, packages: Sequence[str], program: str, mirror: str) -> None:
    """Unpack the packages to `folder`/root and write `folder`/`script`, which runs `program`. Raises as `unpack_with`."""
    unpack_with(folder, script, suite, packages, partial(_write_launcher, program=program), mirror)


def unpack_with(
    folder: Path,
    script: str,
    suite: str,
    packages: Sequence[str],
    write_launcher: Callable[[Path], None],
    mirror: str,
    left_out: Sequence[str] | None = None,
) -> None:
    """Unpack the packages to `folder`/root and let `write_launcher` write the script's path. It accepts `--version`.

    left_out: with it, also unpack all that the packages depend on except these. Raises OSError, StopIteration or SubprocessError, and
    leaves no partial installation.
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

        def apt(*command: str) -> str:
            called = ["apt-get", *options, *command]
            return subprocess.run(
                called, cwd=work / "debs", check=True, timeout=600, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
            ).stdout

        apt("update")
        if left_out is not None:
            planned = apt("install", "--simulate", "--no-install-recommends", *packages)  # "Inst NAME (VERSION …)"
            packages = [line.split()[1] for line in planned.splitlines() if line.startswith("Inst ")]
            packages = [name for name in packages if name not in left_out]
        apt("download", *packages)
        for package in (work / "debs").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True, timeout=60)
        launcher = work / script
        write_launcher(launcher)
        launcher.chmod(0o755)
        subprocess.run([launcher, "--version"], check=True, timeout=20, stdout=subprocess.DEVNULL)
        for leftover in ("lists", "cache", "debs"):
            shutil.rmtree(work / leftover)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for part in ("root", script):
            (work / part).rename(folder / part)


def libraries() -> str:
    """Return the folder of this machine's libraries in a Debian system, relative to its root."""
    return f"usr/lib/{platform.machine()}-linux-gnu"


def _write_launcher(path: Path, program: str) -> None:
    root = path.parent / "root"
    inside = next(root.rglob("ld-linux-*.so.*")).relative_to(root)
    path.write_text(
        '#!/bin/sh\nroot="$(dirname "$0")/root"\n'
        f'exec "$root/{inside}" --library-path "$root/{libraries()}:$root/{libraries()[4:]}" "$root/usr/bin/{program}" "$@"\n'
    )


def debian_mirror() -> str:
    """Return the mirror from which this machine's apt gets Debian; empty if there is none."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split() if shutil.which("apt-get") else []
    return next((uri for uri in found if uri.rstrip("/").endswith("/debian")), "")
