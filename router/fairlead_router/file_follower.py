"""Reads files again when they change: keys, certificates, the split of a canary, and the models of other services."""

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")
Stamp = tuple[int, int, int]


class FileFollower(Generic[Content]):
    """Calls `read` for each version of `paths`. Kubernetes replaces a symbolic link, so the link's target is compared."""

    def __init__(self, read: Callable[[], Content], *paths: Path) -> None:
        self._read, self._paths = read, paths
        self._seen: list[Stamp] | None = None

    def poll(self) -> Content | None:
        """Return the content of a new version; None: the files are unchanged.

        Raises what `read` raises, once for each version; after an OSError the next call reads again.
        """
        try:
            stamps = [_stamp(path) for path in self._paths]
            if stamps == self._seen:
                return None
            self._seen = stamps
            return self._read()
        except OSError:
            self._seen = None
            raise


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
