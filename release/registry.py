"""A registry on loopback: CNCF Distribution, from PATH or unpacked from Debian's package into the user's cache.

`python -m release.registry` fetches it for the tests.
"""

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import debian

from release.errors import Missing, ReleaseFailed

PROGRAMS = ("docker-registry", "registry")
SECONDS = 20.0
"""Time for a start, of which it needs a fraction of a second."""
_CONFIG = """version: 0.1
log: {{level: info, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: "{folder}/data"}}}}
http: {{addr: "127.0.0.1:0"}}
"""


def installed_registry() -> Path | None:
    """Return the registry's program; None if there is none yet."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    return Path(found) if found else _launcher() if _launcher().exists() else None


def find_registry() -> Path:
    """Return the registry's program, and fetch it if there is none yet. Raises Missing."""
    if (installed := installed_registry()) is not None:
        return installed
    launcher, mirror = _launcher(), debian.debian_mirror()
    if not mirror:
        raise Missing("a registry: install the package docker-registry, or put CNCF Distribution's `registry` on PATH")
    try:
        debian.unpack(launcher.parent, "registry", "bookworm", ["docker-registry", "libc6"], "docker-registry", mirror)
    except (OSError, subprocess.SubprocessError, StopIteration) as error:
        raise Missing(f"a registry: Debian's package docker-registry cannot be fetched ({error}); install it") from error
    return launcher


@contextmanager
def run_registry(program: Path) -> Iterator[str]:
    """Run an empty registry, and provide its HOST:PORT. Raises ReleaseFailed if it does not start."""
    with tempfile.TemporaryDirectory(prefix="fairlead-registry-") as name:
        folder = Path(name)
        config, log = folder / "config.yml", folder / "log"
        config.write_text(_CONFIG.format(folder=folder))
        with log.open("wb") as output:
            process = subprocess.Popen([program, "serve", config], stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            yield _wait_listening(process, log)
        finally:
            process.terminate()
            process.wait(SECONDS)


def _launcher() -> Path:
    return debian.cache() / "registry" / "registry"


def _wait_listening(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text()):
            return found[1]
        time.sleep(0.02)
    raise ReleaseFailed(f"the registry did not start within {SECONDS:.0f} s:\n{log.read_text()[-2000:]}")


if __name__ == "__main__":
    try:
        print(f"registry: {find_registry()}")
    except Missing as error:
        print(f"tests skip the rehearsal of a push, missing: {error}")
