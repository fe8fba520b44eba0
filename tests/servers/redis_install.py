"""Redis 7, Redis 8 and Valkey 8 as Debian builds them, for the tests: `make redis-servers`. The system is not changed.

Each is unpacked with the libraries of its own release and runs with that release's loader, so any Debian-like machine can have them all.
They are kept in the user's cache, outside the checkout. A machine without apt or without a network keeps what it has, and tests skip.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARIES = "libc6 libatomic1 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson libsystemd0 libcap2 libzstd1 liblz4-1 liblzma5 libgcc-s1"
SERVERS = {  # kind: suite, packages, program
    "7.0": ("bookworm", f"redis-server redis-tools libssl3 libgcrypt20 libgpg-error0 {LIBRARIES}", "redis-server"),
    "8.0": ("trixie", f"redis-server redis-tools libssl3t64 libstdc++6 {LIBRARIES}", "redis-server"),
    "valkey-8": ("bookworm-backports", f"valkey-server valkey-tools libssl3 libgcrypt20 libgpg-error0 {LIBRARIES}", "valkey-server"),
}
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fairlead" / "redis-servers"


def launcher(kind: str) -> Path:
    """Return the script that runs a kind of server, whether or not it exists."""
    return cache() / kind / "server"


def install(kind: str, mirror: str) -> None:
    """Install one kind of server. Raises OSError or CalledProcessError, and leaves no partial installation."""
    suite, packages, program = SERVERS[kind]
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as name:
        work = Path(name)
        for folder in ("lists/partial", "cache/archives/partial", "debs", "root"):
            (work / folder).mkdir(parents=True)
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
        for command in (["update"], ["download", *packages.split()]):
            subprocess.run(["apt-get", *options, *command], cwd=work / "debs", check=True, timeout=120, stdin=subprocess.DEVNULL)
        for package in (work / "debs").glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True, timeout=60)
        libraries = f"usr/lib/{platform.machine()}-linux-gnu"
        loader = next(path for path in (work / "root").rglob("ld-linux-*.so.*"))
        inside = loader.relative_to(work / "root")
        script = work / "server"
        script.write_text(
            '#!/bin/sh\nroot="$(dirname "$0")/root"\n'
            f'exec "$root/{inside}" --library-path "$root/{libraries}:$root/{libraries[4:]}" "$root/usr/bin/{program}" "$@"\n'
        )
        script.chmod(0o755)
        subprocess.run([script, "--version"], check=True, timeout=10, stdout=subprocess.DEVNULL)
        for leftover in ("lists", "cache", "debs"):
            shutil.rmtree(work / leftover)
        shutil.rmtree(cache() / kind, ignore_errors=True)
        (cache() / kind).mkdir()
        for part in ("root", "server"):
            (work / part).rename(cache() / kind / part)


def debian_mirror() -> str:
    """Return the mirror from which this machine's apt gets Debian; empty if there is none."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout.split() if shutil.which("apt-get") else []
    return next((uri for uri in found if uri.rstrip("/").endswith("/debian")), "")


def main() -> None:
    missing = [kind for kind in SERVERS if not launcher(kind).exists()]
    mirror = debian_mirror() if missing else ""
    if missing and not mirror:
        print(f"no apt with a Debian mirror here: tests skip the servers {', '.join(missing)}", file=sys.stderr)
        return
    for kind in missing:
        try:
            install(kind, mirror)
            print(f"server {kind}: {launcher(kind)}")
        except (OSError, subprocess.SubprocessError, StopIteration) as error:
            print(f"server {kind} could not be fetched, tests skip it: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
