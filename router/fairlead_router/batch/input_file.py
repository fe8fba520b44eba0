"""Reading of a batch's input file, in chunks or line by line."""

import asyncio
from collections.abc import AsyncIterator

from fairlead_router.batch.records import BatchRecord
from fairlead_router.batch.storage.base import Storage
from fairlead_router.batch.validation import Line, LineIndex, LineSplitter, decode_line

CHUNK_BYTES = 1 << 20


async def read_chunks(storage: Storage, batch: BatchRecord) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield the file in chunks, each with whether it is the last one."""
    name = f"files/{batch.input_file_id}"
    size, at = await storage.size(name), 0
    while at < size:
        chunk = await storage.read(name, at, CHUNK_BYTES if at + CHUNK_BYTES < size else size - at)
        at += len(chunk)
        yield chunk, at >= size


async def read_lines(storage: Storage, batch: BatchRecord, splitter: LineSplitter) -> AsyncIterator[list[tuple[int, bytes]]]:
    """Yield the lines of each chunk with their numbers. `splitter` gets the index of all lines."""
    async for chunk, is_last in read_chunks(storage, batch):
        yield await asyncio.to_thread(list, splitter.feed(chunk, is_last))


async def read_line(storage: Storage, batch: BatchRecord, index: LineIndex, position: int) -> Line:
    """Return the line at `position` of the index."""
    return decode_line(await storage.read(f"files/{batch.input_file_id}", index.starts[position], index.lengths[position]))
