"""Download cache, shared by all workers of a node or a volume: one worker downloads a model, the others wait and report it.

The lock is `flock` on a file for each model. The kernel releases it when its holder ends for any reason, so no lock is ever stale. On
NFS (v3 and v4) Linux turns it into a server lock, which expires with a lost node's lease (90 s by default). On a file system without
locks (some FUSE ones) every worker downloads. Whole files are renamed into place, so that only costs traffic.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.digest import file_digest
from fairlead_worker.weights.progress import Progress

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""Interval between two attempts at a lock that another worker holds, and between two progress notes of the holder."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
FULL = (errno.ENOSPC, errno.EDQUOT)


class ModelCache:
    """Downloads below `root`. `owner` names the downloading worker to the workers that wait."""

    def __init__(self, root: Path, owner: str = "") -> None:
        self.root = root
        self._own = root / "fairlead"
        self._owner = owner or os.uname().nodename

    def folder(self, uri: str) -> Path:
        """Return the folder for a model's files, unless another client manages them in its own layout."""
        return self._own / "models" / _key(uri)

    @property
    def read_only(self) -> bool:
        """Return whether the cache is read-only: an administrator fills it, and workers only use it."""
        return any(path.exists() and not os.access(path, os.W_OK, effective_ids=True) for path in (self.root, self._own))

    @contextmanager
    def lock(self, uri: str, progress: Progress) -> "Iterator[LockProgress]":
        """Lock the download of `uri` in this cache, waiting for another worker's. Yields the Progress to report to; waiting workers read
        it too.

        Raises ModelLoadError, also in place of errors of an unwritable or full volume inside the context.
        """
        try:
            path = self._own / "locks" / f"{_key(uri)}.lock"
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a+b") as lock:
                is_exclusive = _wait(lock.fileno(), path, progress)
                yield LockProgress(path, self._owner, progress, is_exclusive)
        except OSError as error:
            raise self.explain(uri, error) from error

    def is_complete(self, uri: str, folder: Path) -> bool:
        """Return whether `folder` holds all of `uri` as it was when its download ended (names, sizes, samples of the contents)."""
        known = self._manifest(uri)
        return bool(known) and all(_matches(folder / name, digest) for name, digest in known.items())

    def is_damaged(self, uri: str, folder: Path) -> bool:
        """Return whether a completed download has changed, by a volume that lost writes or by hand. False if no download completed."""
        known = self._manifest(uri)
        return bool(known) and not all(_matches(folder / name, digest) for name, digest in known.items())

    def mark_complete(self, uri: str, folder: Path) -> None:
        """Record that the download is complete, with the digests of its files."""
        path = self._own / "complete" / f"{_key(uri)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        found = [file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(".")]
        files = {str(file.relative_to(folder)): file_digest(file) for file in found}
        replace_json(path, {"uri": uri, "files": files})

    def explain(self, uri: str, error: OSError) -> ModelLoadError:
        """Return an error that says what to do about a volume that fails."""
        if error.errno in FULL:
            free = shutil.disk_usage(self.root).free / 2**30
            return ModelLoadError(uri, f"{self.root} is full ({free:.1f} GiB free): enlarge the volume of spec.model.cache, or clear it")
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            user = f"user {os.getuid()}, group {os.getgid()}"
            return ModelLoadError(
                uri, f"{error.filename or self.root} may not be written by {user}: let spec.model.cache be writable for it"
            )
        return ModelLoadError(uri, f"the cache {self.root} failed: {error}")

    def check_space(self, uri: str, needed: int) -> None:
        """Raise ModelLoadError if `needed` more bytes do not fit, before an hour of downloading instead of after it."""
        free = shutil.disk_usage(self._own).free
        if needed > free:
            raise ModelLoadError(
                uri,
                f"{needed / 2**30:.1f} GiB are still to be downloaded, and {self.root} has {free / 2**30:.1f} GiB free: "
                "enlarge the volume of spec.model.cache, or clear it",
            )

    def _manifest(self, uri: str) -> dict[str, str]:
        """Return file name → digest; empty if no download of `uri` completed."""
        try:
            read = json.loads((self._own / "complete" / f"{_key(uri)}.json").read_bytes())
            return dict(read["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return {}


class LockProgress:
    """Forwards progress, and writes it into the lock file now and then for waiting workers."""

    def __init__(self, path: Path, owner: str, progress: Progress, is_exclusive: bool = True) -> None:
        """`is_exclusive`: False on a volume without locks, where others may download the same model into the same cache."""
        self.is_exclusive = is_exclusive
        self._path, self._owner, self._progress = path, owner, progress
        self._noted = 0.0
        self._writing = threading.Lock()
        self("download", 0)

    def __call__(self, phase: str, percent: int, done: int = 0, total: int = 0, note: str = "") -> None:
        self._progress(phase, percent, done, total, note)
        now = time.monotonic()
        if now - self._noted < LOOK_SECONDS or not self._writing.acquire(blocking=False):
            return
        try:
            self._noted = now
            # Written in place: the lock is on this file, and a new file under its name would be another lock.
            text = json.dumps({"pod": self._owner, "percent": percent, "done": done, "total": total})
            with self._path.open("r+") as file:
                file.write(text)
                file.truncate()
        finally:
            self._writing.release()


def _wait(lock: int, path: Path, progress: Progress) -> bool:
    """Wait for the lock. Returns False on a volume without locks."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            seen = _note(path)
            holder = seen.get("pod") or "another worker"
            progress(
                "wait",
                int(seen.get("percent", 0)),
                int(seen.get("done", 0)),
                int(seen.get("total", 0)),
                f"for {holder}, which downloads it",
            )
            time.sleep(LOOK_SECONDS)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(
                "%s: the volume has no file locks (%s): workers that start together each download the model", path, error.strerror
            )
            return False


def _note(path: Path) -> Mapping[str, Any]:
    try:
        read = json.loads(path.read_bytes())
        return read if isinstance(read, dict) else {}
    except (OSError, ValueError):
        return {}  # it is being written


def _matches(path: Path, digest: str) -> bool:
    try:
        return file_digest(path) == digest
    except OSError:
        return False


def replace_json(path: Path, value: object) -> None:
    """Write a file whole, or not at all."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.new")
    fresh.write_text(json.dumps(value))
    fresh.replace(path)


def _key(uri: str) -> str:
    """Return a file name for a URI: its readable last part, and a digest."""
    return f"{uri.rstrip('/').rpartition('/')[2].replace('@', '-')}-{xxhash.xxh3_64_hexdigest(uri.encode())}"
