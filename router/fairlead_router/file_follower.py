"""Reads files again when they change: keys, certificates, the split of a canary, and the models of other services."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
Content = TypeVar("Content")
Stamp = tuple[int, int, int]


class FileFollower(Generic[Content]):
    """The newest usable version of `paths`, as `content`. Another version is logged once, and `problem` says why it cannot be used.

    Kubernetes replaces a symbolic link, so the link's target is compared.
    """

    def __init__(
        self,
        what: str,
        read: Callable[[], Content],
        *paths: Path,
        default: Content,
        without: str = "the default is in use",
        on_change: Callable[[Content], None] = lambda content: None,
    ) -> None:
        """`read`: raises OSError or ValueError for a version that cannot be used. `default`: the content before the first usable version,
        and `without` says in the log what that means. `on_change`: called with each new content, the first too."""
        self._what, self._read, self._paths, self._without, self._on_change = what, read, paths, without, on_change
        self._seen: list[Stamp | None] | None = None
        self._is_usable = False
        self.content, self.problem = default, ""
        if self.reload():
            on_change(self.content)

    def reload(self) -> bool:
        """Read the files if they have changed. Return whether the content is another one."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._seen:
            return False
        self._seen = stamps
        try:
            content = self._read()
        except OSError as error:
            self._seen = None  # try again, though the files stay as they are
            self._report_problem(error.strerror or type(error).__name__)
            return False
        except ValueError as error:
            self._report_problem(str(error) or type(error).__name__)
            return False
        is_new = content != self.content
        self.content, self.problem, self._is_usable = content, "", True
        return is_new

    async def follow(self) -> None:
        """Reload the files while they change, without end."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            if await asyncio.to_thread(self.reload):  # parsing thousands of keys takes longer than a stream may pause
                self._on_change(self.content)

    def _report_problem(self, why: str) -> None:
        if why != self.problem:
            rest = "the version read before stays in use" if self._is_usable else self._without
            logger.error("%s cannot be used: %s; %s", self._what, why, rest)
        self.problem = why


def json_file(
    what: str, path: Path, default: Content, on_change: Callable[[Content], None] = lambda content: None
) -> FileFollower[Content]:
    """Follow a JSON file. Without a file its content is the default."""

    def read() -> Content:
        try:
            return msgspec.json.decode(path.read_bytes(), type=type(default))
        except FileNotFoundError:
            return default

    def log_change(content: Content) -> None:
        logger.info("%s: %s", what, content)
        on_change(content)

    return FileFollower(f"{what} {path}", read, path, default=default, on_change=log_change)


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None  # reading it fails as well
    return stat.st_mtime_ns, stat.st_ino, stat.st_size
