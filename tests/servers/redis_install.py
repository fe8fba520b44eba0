"""Redis 7, Redis 8 and Valkey 8 as Debian builds them, for the tests: `make redis-servers`. The system is not changed.

They are kept in the user's cache, outside the checkout. A machine without apt or without a network keeps what it has, and tests skip.
"""

import subprocess
import sys
from pathlib import Path

from tests.servers import debian

LIBRARIES = "libc6 libatomic1 libjemalloc2 liblua5.1-0 liblzf1 lua-bitop lua-cjson libsystemd0 libcap2 libzstd1 liblz4-1 liblzma5 libgcc-s1"
SERVERS = {  # kind: suite, packages, program
    "7.0": ("bookworm", f"redis-server redis-tools libssl3 libgcrypt20 libgpg-error0 {LIBRARIES}", "redis-server"),
    "8.0": ("trixie", f"redis-server redis-tools libssl3t64 libstdc++6 {LIBRARIES}", "redis-server"),
    "valkey-8": ("bookworm-backports", f"valkey-server valkey-tools libssl3 libgcrypt20 libgpg-error0 {LIBRARIES}", "valkey-server"),
}


def launcher(kind: str) -> Path:
    """Return the script that runs a kind of server, whether or not it exists."""
    return debian.cache() / "redis-servers" / kind / "server"


def main() -> None:
    missing = [kind for kind in SERVERS if not launcher(kind).exists()]
    mirror = debian.debian_mirror() if missing else ""
    if missing and not mirror:
        print(f"no apt with a Debian mirror here: tests skip the servers {', '.join(missing)}", file=sys.stderr)
        return
    for kind in missing:
        suite, packages, program = SERVERS[kind]
        try:
            debian.unpack(launcher(kind).parent, "server", suite, packages.split(), program, mirror)
            print(f"server {kind}: {launcher(kind)}")
        except (OSError, subprocess.SubprocessError, StopIteration) as error:
            print(f"server {kind} could not be fetched, tests skip it: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
