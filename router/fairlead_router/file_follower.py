"""Reads files again when they change: keys, certificates, the split of a canary, and the models of other services."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

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


class JsonFile(Generic[Content]):
    """The newest valid version of a JSON file, as `content`. Without a file it is the default."""

    def __init__(self, what: str, path: Path, default: Content) -> None:
        self._what, self._path, self._default = what, path, default
        self._file = FileFollower(lambda: msgspec.json.decode(path.read_bytes(), type=type(default)), path)
        self.content, self._problem = default, ""
        self.reload()

    def reload(self) -> None:
        """Read the file if it has changed."""
        try:
            content = self._file.poll()
        except FileNotFoundError:
            content = self._default
        except (OSError, msgspec.MsgspecError) as error:
            if str(error) != self._problem:
                logger.error("%s %s cannot be used; the previous version stays in use: %s", self._what, self._path, error)
            self._problem = str(error)
            return
        if content is not None:
            if content != self.content:
                logger.info("%s: %s", self._what, content)
            self.content, self._problem = content, ""


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
