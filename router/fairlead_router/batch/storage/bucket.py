"""Storage in an S3 bucket. Credentials, region and endpoint come from the AWS_* variables, or from the pod's role.

A bucket has no lock. Instead every write is conditional (`If-None-Match`, `If-Match`): a process whose view is old fails with
StorageConflict. A log is a sequence of numbered objects, each written only if its number is free. So the writer of number N has read or
written all before it, and no line is stored twice, even while two processes run.
"""

import os
from collections.abc import AsyncIterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import S3Store

from fairlead_router.batch.storage.base import Log, StorageConflict, StorageError, Upload
from fairlead_router.batch.storage.lines import complete_lines

PART_BYTES: Final = 8 << 20
RETRY_SECONDS: Final = 60


class Bucket:
    """Storage below `folder` of a bucket."""

    flush_seconds = 2.0

    def __init__(self, bucket: str, folder: str) -> None:
        self.uri = f"s3://{bucket}/{folder}".rstrip("/")
        retries = {"max_retries": 6, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
        plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
        options = {"allow_http": plain, "timeout": timedelta(seconds=RETRY_SECONDS), "connect_timeout": timedelta(seconds=10)}
        self.store = S3Store(bucket, prefix=folder or None, retry_config=retries, client_options=options)  # type: ignore[arg-type]
        self._tags: dict[str, str] = {}
        """ETag of each object that `put` may replace, as this process knows it."""

    async def open(self) -> None:
        await self.names("batches")

    async def names(self, folder: str) -> list[str]:
        with self.errors():
            listed = await obstore.list_with_delimiter_async(self.store, folder)
        found = [one["path"] for one in listed["objects"]] + list(listed["common_prefixes"])
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    async def read(self, name: str, start: int, length: int) -> bytes:
        with self.errors():
            if start == 0 and name.endswith(".json"):
                got = await obstore.get_async(self.store, name)
                self._tags[name] = got.meta["e_tag"] or ""
                return bytes(await got.bytes_async())[:length]
            return bytes(await obstore.get_range_async(self.store, name, start=start, length=length))

    async def size(self, name: str) -> int:
        with self.errors():
            return (await obstore.head_async(self.store, name))["size"]

    async def put(self, name: str, data: bytes) -> None:
        known = self._tags.get(name)
        mode: Any = "create" if known is None else {"e_tag": known}
        with self.errors():
            result = await obstore.put_async(self.store, name, data, mode=mode, use_multipart=False)
        self._tags[name] = result["e_tag"] or ""

    async def upload(self, name: str) -> Upload:
        return BucketUpload(self, name)

    def log(self, name: str) -> Log:
        return BucketLog(self, name)

    async def delete(self, name: str) -> None:
        with self.errors():
            try:
                await obstore.delete_async(self.store, name)
            except FileNotFoundError:
                pass
        self._tags.pop(name, None)

    @contextmanager
    def errors(self) -> Any:
        """Turn errors of the client into StorageError."""
        try:
            yield
        except (AlreadyExistsError, PreconditionError) as error:
            raise StorageConflict(f"{self.uri}: another fairlead-batch has written to it; this one reads everything again") from error
        except (BaseError, OSError) as error:
            raise StorageError(f"{self.uri}: {' '.join(str(error).split('Debug source')[0].split())[:500]}") from error


class BucketUpload:
    """A new object, sent in parts. It exists once all parts are there."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket = bucket
        self._writer: Any = obstore.open_writer_async(bucket.store, name, buffer_size=PART_BYTES)

    async def write(self, data: bytes) -> None:
        with self._bucket.errors():
            await self._writer.write(data)

    async def commit(self) -> None:
        with self._bucket.errors():
            await self._writer.close()

    async def abort(self) -> None:
        self._writer = None  # parts without an end are no object; a lifecycle rule of the bucket removes them


class BucketLog:
    """Numbered objects below `name`, each with complete lines."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        self._bucket, self._name = bucket, name
        self._next = 0

    async def recover(self) -> AsyncIterator[bytes]:
        segments = await self._segments()
        self._next = int(segments[-1].rpartition("/")[2]) + 1 if segments else 0
        for segment in segments:
            for line in complete_lines([await self._read(segment)]):
                yield line[:-1]

    async def append(self, lines: list[bytes]) -> None:
        data = b"".join(line + b"\n" for line in lines)
        with self._bucket.errors():
            await obstore.put_async(self._bucket.store, f"{self._name}/{self._next:08d}", data, mode="create", use_multipart=False)
        self._next += 1

    async def seal(self, name: str) -> int:
        segments = await self._segments()
        if not segments:
            return 0
        upload, size = BucketUpload(self._bucket, name), 0
        for segment in segments:
            data = await self._read(segment)
            await upload.write(data)
            size += len(data)
        await upload.commit()
        return size

    async def delete(self) -> None:
        segments = await self._segments()
        with self._bucket.errors():
            if segments:
                await obstore.delete_async(self._bucket.store, segments)

    async def _segments(self) -> list[str]:
        with self._bucket.errors():
            listed = await obstore.list(self._bucket.store, f"{self._name}/").collect_async()
        return sorted(one["path"] for one in listed)

    async def _read(self, segment: str) -> bytes:
        with self._bucket.errors():
            return bytes(await (await obstore.get_async(self._bucket.store, segment)).bytes_async())
