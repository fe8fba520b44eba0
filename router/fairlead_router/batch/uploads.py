"""POST /v1/files: a multipart form whose file goes to the storage as it arrives, so that no file has to fit into memory."""

import time
from collections.abc import Callable
from typing import Final

from aiohttp import web

from fairlead_common.truncate import quote, truncate
from fairlead_router.batch.form import MALFORMED, read_field, read_parts, read_pieces
from fairlead_router.batch.records import FileRecord, new_id
from fairlead_router.batch.requests import form_lifetime, invalid
from fairlead_router.batch.storage.base import Upload
from fairlead_router.batch.store import Store
from fairlead_router.errors import ApiError

MAX_UPLOADS: Final = 8
"""Uploads of a tenant at the same time."""


class Uploads:
    """Receives files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._running: dict[str, int] = {}

    async def receive(self, tenant: str, request: web.Request) -> FileRecord:
        """Store the file of a form. Raises ApiError 400; then nothing is stored."""
        if self._running.get(tenant, 0) >= MAX_UPLOADS:
            raise ApiError(
                429,
                f"You have {MAX_UPLOADS} uploads under way. Try again in 1 s.",
                code="too_many_uploads",
                headers=[(b"retry-after", b"1")],
            )
        self._store.check_counts(tenant)
        self._store.check_space(tenant)
        self._running[tenant] = self._running.get(tenant, 0) + 1
        id = new_id("file-")
        received = 0

        def count(size: int) -> None:
            nonlocal received
            received += size
            self._store.uploading[tenant] += size
            if received > self._store.limits.max_file_bytes:
                raise invalid(f"The file exceeds {self._store.limits.max_file_bytes} bytes: split it.", "file", "file_too_large")
            self._store.check_space(tenant)

        try:
            return await self._receive(tenant, id, request, count)
        finally:
            self._store.uploading[tenant] -= received
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant], self._store.uploading[tenant]

    async def _receive(self, tenant: str, id: str, request: web.Request, count: Callable[[int], None]) -> FileRecord:
        form: dict[str, str] = {}
        filename, size = "", -1
        upload: Upload | None = None
        try:
            async for part in read_parts(request):
                if part.name == "file":
                    filename, size = truncate(part.filename or "file", 255), 0
                    upload = await self._store.storage.upload(f"files/{id}")
                    async for piece in read_pieces(part):
                        count(len(piece))
                        size += len(piece)
                        await upload.write(piece)
                else:
                    form[part.name or ""] = await read_field(part)
            if upload is None:
                raise invalid("The form has no field file.", "file")
            if form.get("purpose") != "batch":
                raise invalid(f"purpose is {quote(form.get('purpose', ''))}; this service stores files for batches: give batch.", "purpose")
            if not size:
                raise invalid("The file is empty.", "file", "empty_file")
            now = int(time.time())
            file = FileRecord(id, tenant, filename, "batch", size, now, now + form_lifetime(form, self._store.limits.retention))
            await upload.commit()
            upload = None
            await self._store.add_file(file)
            return file
        except MALFORMED as error:
            raise invalid(f"The body is not a multipart/form-data form with file and purpose: {truncate(error)}.") from None
        finally:
            if upload is not None:
                await upload.abort()
