"""What the Batch API needs of a storage. A write is durable when its method returns, and atomic under kill -9.

Names are paths with `/`. A log is a sequence of complete lines that only grows. `seal` turns it into a file.
"""

from collections.abc import AsyncIterator
from typing import Protocol


class StorageError(Exception):
    """The storage cannot be used now. The message names it and the cause."""


class StorageConflict(StorageError):
    """Another process writes to the same storage: this one must end, and read everything again."""


class Upload(Protocol):
    """A file in progress. It exists after `commit` only."""

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...


class Log(Protocol):
    """Log of one writer."""

    def recover(self) -> AsyncIterator[bytes]:
        """Yield the lines that are stored, without line breaks. Call it before the first `append`, and after each failed one."""
        ...

    async def append(self, lines: list[bytes]) -> None:
        """Add lines, all of them or a part from the first on. They are durable when this returns."""
        ...

    async def seal(self, name: str) -> int:
        """Make the lines the file `name`, and return its bytes; 0: there are none, and no file. May be repeated."""
        ...

    async def delete(self) -> None: ...


class Storage(Protocol):
    """A folder or a bucket."""

    flush_seconds: float
    """Shortest time between two appends to a log: requests to a bucket cost money."""

    async def open(self) -> None:
        """Take the storage for this process. Raises StorageError if another process has it."""
        ...

    async def names(self, folder: str) -> list[str]:
        """Return the names in a folder, also of logs."""
        ...

    async def read(self, name: str, start: int, length: int) -> bytes:
        """Return at most `length` bytes. Raises StorageError."""
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Write a whole small file, new or in place of the one that this process read or wrote last."""
        ...

    async def size(self, name: str) -> int:
        """Return the bytes of a file. Raises StorageError."""
        ...

    async def upload(self, name: str) -> Upload: ...

    def log(self, name: str) -> Log: ...

    async def delete(self, name: str) -> None:
        """Remove a file, or nothing if there is none."""
        ...
