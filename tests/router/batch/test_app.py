"""The HTTP server in this process, with a storage that answers as the test says."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.router.batch.deployment import line, to_file
from tests.router.harness import eventually

from fairlead_router.batch.app import PIECE_BYTES, BatchApp
from fairlead_router.batch.config import BatchConfig
from fairlead_router.batch.line_client import LineClient
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import ConcurrencyLimit, Slots
from fairlead_router.batch.records import FileRecord
from fairlead_router.batch.runner import RUNNING_OF_TENANT, Runner
from fairlead_router.batch.storage.base import StorageError
from fairlead_router.batch.storage.folder import Folder
from fairlead_router.batch.store import Store
from fairlead_router.tenancy.shared_secret import SharedSecret

Client = TestClient[web.Request, web.Application]
NEW = {"input_file_id": "file-in", "endpoint": "/v1/completions", "completion_window": "24h"}


@asynccontextmanager
async def serving(storage: Folder, root: Path) -> AsyncIterator[Client]:
    """Serve a storage that holds the file `file-in` of three pieces."""
    config, secret, metrics = BatchConfig(storage=f"file://{root}", router_url="http://127.0.0.1:1"), SharedSecret(""), BatchMetrics()
    store, size = Store(storage, config), 3 * PIECE_BYTES
    await store.load()
    (root / "files" / "file-in").write_bytes(b"x" * size)
    await store.add_file(FileRecord("file-in", "", "in", "batch", size, 1, 2**40))
    async with LineClient(config.router_url, secret) as client:
        runner = Runner(store, client, Slots(ConcurrencyLimit(8)), config, metrics, lambda: None)
        app = BatchApp(store, runner, config, secret, metrics, lambda: None)
        async with TestClient(TestServer(app.create())) as http:
            yield http
            await runner.close()
    storage.close()


class LosesContent(Folder):
    """A storage whose second read of a file fails, or finds its end, as after `DELETE`."""

    error: StorageError | None = None

    async def read(self, name: str, start: int, length: int) -> bytes:
        if name == "files/file-in" and start:
            if self.error is not None:
                raise self.error
            return b""
        return await super().read(name, start, length)


@pytest.mark.parametrize("error", [StorageError("away"), None])
async def test_a_download_that_fails_ends_with_its_connection_and_without_other_bytes(tmp_path: Path, error: StorageError | None) -> None:
    storage, received = LosesContent(tmp_path), bytearray()
    storage.error = error
    async with serving(storage, tmp_path) as http, http.get("/v1/files/file-in/content") as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            async for piece in answer.content.iter_any():
                received += piece
    assert received == b"x" * PIECE_BYTES


class SlowBatches(Folder):
    """A storage that writes a new batch only when it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()

    async def put(self, name: str, data: bytes) -> None:
        if name.startswith("batches/"):
            self.is_writing.set()
            await self.may_write.wait()
        await super().put(name, data)


async def test_a_file_is_not_deleted_while_a_batch_of_it_is_created(tmp_path: Path) -> None:
    storage = SlowBatches(tmp_path)
    async with serving(storage, tmp_path) as http:
        creating = asyncio.create_task(http.post("/v1/batches", json=NEW))
        await storage.is_writing.wait()
        deleting = asyncio.create_task(http.delete("/v1/files/file-in"))
        await (await http.get("/health")).read()  # the deletion has arrived too
        storage.may_write.set()
        assert (await creating).status == 200
        assert (await deleting).status == 400
        assert (tmp_path / "files" / "file-in").exists()


async def test_a_batch_that_waits_for_others_can_be_cancelled(tmp_path: Path) -> None:
    """The router is away, so the others do not end."""
    storage = Folder(tmp_path)
    async with serving(storage, tmp_path) as http:
        lines = to_file([line("a")])
        (tmp_path / "files" / "file-in").write_bytes(lines + b"\n" * (3 * PIECE_BYTES - len(lines)))
        ids = [(await (await http.post("/v1/batches", json=NEW)).json())["id"] for _ in range(RUNNING_OF_TENANT + 1)]

        async def status(id: str) -> str:
            return str((await (await http.get(f"/v1/batches/{id}")).json())["status"])

        async def all_run() -> bool:
            return [await status(id) for id in ids] == ["in_progress"] * RUNNING_OF_TENANT + ["validating"]

        async def is_cancelled() -> bool:
            return await status(ids[-1]) == "cancelled"

        await eventually(all_run, "all but the last run")
        assert (await http.post(f"/v1/batches/{ids[-1]}/cancel")).status == 200
        await eventually(is_cancelled, "the last one ends")
        assert [await status(id) for id in ids[:-1]] == ["in_progress"] * RUNNING_OF_TENANT
