"""Paths: a cache that outlives runs and checkouts, and one directory for each running cluster."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from e2e import progress

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent


def cache_root() -> Path:
    """Return the folder of downloads, builds and imported images. It may be deleted while no cluster runs."""
    return Path(os.environ.get("FAIRLEAD_CACHE") or Path.home() / ".cache" / "fairlead")


def run_root() -> Path:
    """Return the folder with one directory for each running cluster, which `down` removes. Unix sockets need short names."""
    return cache_root() / "run"


def content_key(*parts: str | bytes | Path) -> str:
    """Return a digest of these contents. A Path means the bytes of its file."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


@contextmanager
def locked(path: Path, notice: str = "") -> Iterator[None]:
    """Hold an exclusive lock on `path`, so that two runs never build or start the same thing; print `notice` while waiting for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            flock(handle, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            with progress.step(f"{notice or 'wait for another run that holds the lock'} ({path})"):
                flock(handle, LOCK_EX)
        yield
