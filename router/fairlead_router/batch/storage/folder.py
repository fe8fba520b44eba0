"""Storage in a folder, for example on a PersistentVolumeClaim. One process has it at a time, by `flock`.

The kernel releases the lock when its holder ends for any reason. A log is one file: its lines are appended and synced, and recovery
truncates what a crash left incomplete.
"""

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from fairlead_router.batch.storage.base import Log, StorageError, Upload
from fairlead_router.batch.storage.lines import complete_lines

CHUNK_BYTES = 1 << 20
_Result = TypeVar("_Result")


class Folder:
    """Storage in `root`, which is created."""

    flush_seconds = 0.0

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock: int | None = None

    async def open(self) -> None:
        await self._run(self._open)

    def _open(self) -> None:
        for name in ("files", "batches"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._root / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StorageError(f"{self._root} is in use by another fairlead-batch: only one may run") from None

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)

    async def names(self, folder: str) -> list[str]:
        return await self._run(lambda: sorted(path.name for path in (self._root / folder).iterdir()))

    async def read(self, name: str, start: int, length: int) -> bytes:
        return await self._run(lambda: self._read(name, start, length))

    def _read(self, name: str, start: int, length: int) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start)
            return file.read(length)

    async def size(self, name: str) -> int:
        return await self._run(lambda: (self._root / name).stat().st_size)

    async def put(self, name: str, data: bytes) -> None:
        await self._run(lambda: self._put(self._root / name, data))

    @staticmethod
    def _put(path: Path, data: bytes) -> None:
        fresh = path.with_name(f"{path.name}.part")
        with fresh.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        _sync_folder(path.parent)

    async def upload(self, name: str) -> Upload:
        return await self._run(lambda: FolderUpload(self._root / name, self._run))

    def log(self, name: str) -> Log:
        return FolderLog(self._root, self._root / name, self._run)

    async def delete(self, name: str) -> None:
        await self._run(lambda: _remove(self._root / name))

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        """Run file operations in a thread, so that a slow disk does not delay other requests. Raises StorageError."""
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            hint = ": enlarge the volume, or delete files" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise StorageError(f"{self._root}: {error.strerror}{hint}") from error


class FolderUpload:
    """A new file, written beside its place and moved there when it is complete."""

    def __init__(self, path: Path, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._path, self._run = path, run
        self._part = path.with_name(f"{path.name}.part")
        self._file = self._part.open("wb")

    async def write(self, data: bytes) -> None:
        await self._run(lambda: self._file.write(data))

    async def commit(self) -> None:
        await self._run(self._commit)

    def _commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)
        _sync_folder(self._path.parent)

    async def abort(self) -> None:
        await self._run(self._abort)

    def _abort(self) -> None:
        try:
            self._file.close()
        finally:  # a full disk fails the flush of the last bytes
            _remove(self._part)


class FolderLog:
    """A file to which lines are appended."""

    def __init__(self, root: Path, path: Path, run: Callable[[Callable[[], Any]], Any]) -> None:
        self._root, self._path, self._run = root, path, run
        self._size = 0

    async def recover(self) -> AsyncIterator[bytes]:
        lines = complete_lines(self._chunks())
        self._size = 0
        while batch := await self._run(lambda: [line for line, _ in zip(lines, range(256), strict=False)]):
            for line in batch:
                self._size += len(line)
                yield line[:-1]
        await self._run(self._truncate)

    def _chunks(self) -> Iterator[bytes]:
        if self._path.exists():
            with self._path.open("rb") as file:
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk

    def _truncate(self) -> None:
        if self._path.exists() and self._path.stat().st_size > self._size:
            with self._path.open("r+b") as file:
                file.truncate(self._size)
                os.fsync(file.fileno())

    async def append(self, lines: list[bytes]) -> None:
        await self._run(lambda: self._append(b"".join(line + b"\n" for line in lines)))

    def _append(self, data: bytes) -> None:
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self._path.parent)

    async def seal(self, name: str) -> int:
        return int(await self._run(lambda: self._seal(self._root / name)))

    def _seal(self, target: Path) -> int:
        if self._path.exists():
            self._path.replace(target)
            _sync_folder(target.parent)
            _sync_folder(self._path.parent)
        return target.stat().st_size if target.exists() else 0

    async def delete(self) -> None:
        await self._run(lambda: _remove(self._path))


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Make a rename or removal durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
