"""Owner of all files and batches: in memory for reading, in the storage before a change counts."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec

from fairlead_router.batch.config import LIMITS, BatchLimits
from fairlead_router.batch.records import BatchRecord, FileRecord, Status
from fairlead_router.batch.storage.base import Log, Storage
from fairlead_router.errors import ApiError

logger = logging.getLogger(__name__)

RECORD_BYTES = 4 << 20
"""Longest record, bytes. The problems of a failed batch are limited to far less."""


class Store:
    """Files and batches of all tenants. A tenant sees only its own; for others they do not exist."""

    def __init__(self, storage: Storage, limits: BatchLimits = LIMITS) -> None:
        self.storage, self.limits = storage, limits
        self.files: dict[str, FileRecord] = {}
        self.batches: dict[str, BatchRecord] = {}
        self.log_bytes: Counter[str] = Counter()
        """Bytes of the results of batches that have not ended, by batch."""
        self.file_bytes: Counter[str] = Counter()
        """Bytes of files, by tenant."""
        self.uploading: Counter[str] = Counter()
        """Bytes of unfinished uploads, by tenant."""
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read all records, and remove what no record refers to: an earlier process was killed while it wrote or deleted it."""
        await self.storage.open()
        for name in await self.storage.names("batches"):
            if name.endswith(".json"):
                batch = msgspec.json.decode(await self.storage.read(f"batches/{name}", 0, RECORD_BYTES), type=BatchRecord)
                self.batches[batch.id] = batch
        promised = {id for batch in self.batches.values() if not batch.is_ended for id in (batch.output_id, batch.error_id)}
        names = await self.storage.names("files")
        for name in names:
            if name.endswith(".json"):
                self._count_file(msgspec.json.decode(await self.storage.read(f"files/{name}", 0, RECORD_BYTES), type=FileRecord))
        for name in names:
            if not name.endswith(".json") and name not in self.files and name not in promised:
                await self.storage.delete(f"files/{name}")
        for name in await self.storage.names("batches"):
            id, _, kind = name.partition(".")
            if kind != "json" and (id not in self.batches or self.batches[id].is_ended):
                await self.storage.log(f"batches/{name}").delete()
        logger.info("%d files and %d batches, %d of them unfinished", len(self.files), len(self.batches), len(self.unfinished()))

    # Files

    def file(self, tenant: str, id: str) -> FileRecord:
        """Return a tenant's file. Raises ApiError 404."""
        found = self.files.get(id)
        if found is None or found.tenant != tenant or found.expires_at <= time.time():
            raise ApiError(404, f"There is no file {id} here: it was never uploaded, was deleted, or has expired.", code="not_found")
        return found

    def files_of(self, tenant: str) -> list[FileRecord]:
        """Return a tenant's files, the newest first."""
        now = time.time()
        return _newest_first(file for file in self.files.values() if file.tenant == tenant and file.expires_at > now)

    async def add_file(self, file: FileRecord) -> None:
        """Record a file whose content is stored."""
        await self.storage.put(f"files/{file.id}.json", msgspec.json.encode(file))
        self._count_file(file)

    def _count_file(self, file: FileRecord) -> None:
        if file.id not in self.files:
            self.file_bytes[file.tenant] += file.bytes
        self.files[file.id] = file

    async def delete_file(self, file: FileRecord) -> None:
        """Remove a file. Raises ApiError while an unfinished batch reads it."""
        async with self._changing:
            user = next((batch for batch in self.unfinished() if batch.input_file_id == file.id), None)
            if user is not None:
                message = f"File {file.id} is the input of {user.id}, which is {user.status}: cancel it first."
                raise ApiError(400, message, code="file_in_use")
            await self._remove_file(file)

    async def _remove_file(self, file: FileRecord) -> None:
        await self.storage.delete(f"files/{file.id}.json")  # first: content without a record is removed at the next start
        if self.files.pop(file.id, None) is not None:
            self.file_bytes[file.tenant] -= file.bytes
        await self.storage.delete(f"files/{file.id}")

    # Batches

    def batch(self, tenant: str, id: str) -> BatchRecord:
        """Return a tenant's batch. Raises ApiError 404."""
        found = self.batches.get(id)
        if found is None or found.tenant != tenant:
            raise ApiError(404, f"There is no batch {id} here.", code="not_found")
        return found

    def batches_of(self, tenant: str) -> list[BatchRecord]:
        """Return a tenant's batches, the newest first."""
        return _newest_first(batch for batch in self.batches.values() if batch.tenant == tenant)

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first."""
        return sorted((batch for batch in self.batches.values() if not batch.is_ended), key=lambda batch: batch.id)

    async def add_batch(self, batch: BatchRecord) -> None:
        async with self._changing:
            self.file(batch.tenant, batch.input_file_id)  # it may have been deleted since the request was checked
            await self._put_batch(batch)

    async def change_batch(self, id: str, if_status: tuple[Status, ...], **changes: Any) -> BatchRecord | None:
        """Change a batch if its status is one of `if_status`, and return it; None: another change came first."""
        async with self._changing:
            batch = self.batches[id]
            if batch.status not in if_status:
                return None
            return await self._put_batch(msgspec.structs.replace(batch, **changes))

    async def _put_batch(self, batch: BatchRecord) -> BatchRecord:
        await self.storage.put(f"batches/{batch.id}.json", msgspec.json.encode(batch))
        self.batches[batch.id] = batch
        return batch

    def logs(self, batch: BatchRecord) -> tuple[Log, Log]:
        """Return the logs of successful and failed lines."""
        return self.storage.log(f"batches/{batch.id}.output"), self.storage.log(f"batches/{batch.id}.errors")

    # Bounds

    def stored_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's files, unfinished uploads and results."""
        logs = sum(size for id, size in self.log_bytes.items() if id in self.batches and self.batches[id].tenant == tenant)
        return self.file_bytes[tenant] + logs + self.uploading[tenant]

    def check_space(self, tenant: str, more: int = 0) -> None:
        """Raise ApiError if a tenant stores as much as it may."""
        limit = self.limits.max_stored_bytes
        if self.stored_bytes(tenant) + more > limit:
            raise ApiError(
                400,
                f"Your files and results have {self.stored_bytes(tenant)} bytes, and {limit} are allowed: delete files first.",
                code="storage_limit_exceeded",
            )

    def check_counts(self, tenant: str) -> None:
        """Raise ApiError if a tenant has as many files or batches as it may."""
        if sum(file.tenant == tenant for file in self.files.values()) >= self.limits.max_files:
            raise ApiError(400, f"You have {self.limits.max_files} files, which is the limit: delete some first.", code="too_many_files")
        if sum(batch.tenant == tenant for batch in self.batches.values()) >= self.limits.max_batches:
            raise ApiError(
                400,
                f"You have {self.limits.max_batches} batches, which is the limit; ended ones go after {self.limits.retention} s.",
                code="too_many_batches",
            )

    async def remove_expired(self, now: float) -> None:
        """Remove expired files that no unfinished batch reads, and batches that ended long ago."""
        for file in [file for file in self.files.values() if file.expires_at <= now]:
            async with self._changing:
                if not any(batch.input_file_id == file.id for batch in self.unfinished()):
                    await self._remove_file(file)
        for batch in [one for one in self.batches.values() if one.is_ended and one.ended_at + self.limits.retention <= now]:
            await self.storage.delete(f"batches/{batch.id}.json")
            self.batches.pop(batch.id, None)


def _newest_first(records: Iterable[Any]) -> list[Any]:
    return sorted(records, key=lambda record: record.id.rpartition("_")[2].rpartition("-")[2], reverse=True)
