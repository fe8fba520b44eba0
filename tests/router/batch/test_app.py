"""The HTTP server in this process, with a storage that answers as the test says."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from tests.router.batch.deployment import line, to_file
from tests.router.harness import eventually

from fairlead_router.batch import runner, uploads
from fairlead_router.batch.app import PIECE_BYTES, BatchApp
from fairlead_router.batch.config import LIMITS, BatchLimits
from fairlead_router.batch.line_client import LineClient
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import ConcurrencyLimit, Slots
from fairlead_router.batch.records import FileRecord
from fairlead_router.batch.runner import RUNNING_OF_TENANT, Runner
from fairlead_router.batch.storage.base import StorageError, Upload
from fairlead_router.batch.storage.folder import Folder
from fairlead_router.batch.store import Store
from fairlead_router.batch.unpaid_cpu import HEADER, UnpaidCpu
from fairlead_router.tenancy.shared_secret import SharedSecret

Client = TestClient[web.Request, web.Application]
NEW = {"input_file_id": "file-in", "endpoint": "/v1/completions", "completion_window": "24h"}


class KeepingHandlers(TestServer):
    """A server that cancels no handler whose client leaves, as in production."""

    async def _make_runner(self, **settings: Any) -> web.AppRunner:
        return web.AppRunner(self.app, **settings | {"handler_cancellation": False})


@asynccontextmanager
async def serving(
    storage: Folder, root: Path, changing: asyncio.Lock | None = None, limits: BatchLimits = LIMITS, size: int = 3 * PIECE_BYTES
) -> AsyncIterator[Client]:
    """Serve a storage that holds the file `file-in` of `size` bytes. `changing`: replaces the lock of the store."""
    secret, metrics = SharedSecret(""), BatchMetrics()
    store = Store(storage, limits)
    store._changing = changing or store._changing
    await store.load()
    (root / "files" / "file-in").write_bytes(b"x" * size)
    await store.add_file(FileRecord("file-in", "", "in", "batch", size, 1, 2**40))
    async with LineClient("http://127.0.0.1:1", secret) as client:
        running = Runner(store, client, Slots(ConcurrencyLimit(8)), metrics, lambda: None)
        app = BatchApp(store, running, secret, metrics, lambda: None)
        async with TestClient(KeepingHandlers(app.create())) as http:
            yield http
            await running.close()
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


class TellsHandler(Folder):
    """A storage that tells which task reads a file."""

    handler: asyncio.Task[Any] | None = None

    async def read(self, name: str, start: int, length: int) -> bytes:
        self.handler = asyncio.current_task()
        return await super().read(name, start, length)


async def test_a_client_that_leaves_a_download_causes_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    storage = TellsHandler(tmp_path)
    async with serving(storage, tmp_path, size=32 << 20) as http:  # more than a connection's buffers hold
        answer = await http.get("/v1/files/file-in/content")
        answer.close()
        assert storage.handler is not None
        await asyncio.wait([storage.handler])
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_the_next_answer_reports_the_cpu_time_of_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(runner, "thread_time", lambda: next(clock))
    async with serving(Folder(tmp_path), tmp_path) as http:
        created = await http.post("/v1/batches", json=NEW)
        reports = [created.headers.get(HEADER)]

        async def has_failed() -> bool:
            answer = await http.get(f"/v1/batches/{(await created.json())['id']}")
            reports.append(answer.headers.get(HEADER))
            return (await answer.json())["status"] == "failed"

        await eventually(has_failed, "the file has no line that is JSON")
        reports += [(await http.get("/v1/files/file-in")).headers.get(HEADER) for _ in range(2)]
        assert sum(int(report) for report in reports if report) == 1000 and reports[-1] is None


async def test_a_health_check_takes_no_charge_away_from_the_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owed = UnpaidCpu()
    owed.add("", 1.0)
    monkeypatch.setattr(runner, "UnpaidCpu", lambda: owed)
    async with serving(Folder(tmp_path), tmp_path) as http:
        answers = [await http.get(path) for path in ("/health", "/ready", "/metrics", "/v1/files/file-in")]
    assert [answer.headers.get(HEADER) for answer in answers] == [None, None, None, "1000"]


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


async def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", b"x" * 70_000, filename="a")
    async with serving(Folder(tmp_path), tmp_path, limits=BatchLimits(max_file_bytes=65_536)) as http:
        answer = await http.post("/v1/files", data=form)
        assert answer.status == 400 and "exceeds 65536 bytes" in await answer.text()


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


class WatchedLock(asyncio.Lock):
    """A lock that tells when a task waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_waiter = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        if self.locked():
            self.has_waiter.set()
        return await super().acquire()


async def test_a_file_is_not_deleted_while_a_batch_of_it_is_created(tmp_path: Path) -> None:
    storage, changing = SlowBatches(tmp_path), WatchedLock()
    async with serving(storage, tmp_path, changing) as http:
        creating = asyncio.create_task(http.post("/v1/batches", json=NEW))
        await storage.is_writing.wait()
        deleting = asyncio.create_task(http.delete("/v1/files/file-in"))
        waiting = asyncio.create_task(changing.has_waiter.wait())
        await asyncio.wait((waiting, deleting), return_when=asyncio.FIRST_COMPLETED)
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


BOUNDARY = "b0undary"


def part(name: str, content: bytes = b"x", *headers: str) -> bytes:
    head = "".join(f"{each}\r\n" for each in (f'Content-Disposition: form-data; name="{name}"', *headers))
    return f"--{BOUNDARY}\r\n{head}\r\n".encode() + content + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()
PURPOSE, CONTENT = part("purpose", b"batch"), part("file", b"{}\n" * 1000)
FORMS = {
    "repeated field": part("purpose", b"batch") * 20_000,
    "repeated file": CONTENT * 100,
    "many fields": b"".join(part(f"f{number}") for number in range(20_000)),
    "many charsets": part("_charset_", b"utf-8") * 20_000,
    "lines before the form": b"\n" * 1_000_000 + PURPOSE + CONTENT,
    "a line before the form": b"x" * 1_000_000 + b"\r\n" + PURPOSE + CONTENT,
    "many headers": part("file", b"x", *(f"x-{number}: y" for number in range(20_000))),
    "a long header": part("file", b"x", "x-long: " + "y" * 1_000_000),
    "a long name": part("n" * 1_000_000),
    "no header": f"--{BOUNDARY}\r\n{{}}\r\n\r\n".encode(),
    "a form in the form": part("file", b"x", "Content-Type: multipart/mixed; boundary=c"),
    "base64": part("file", b"A" + b"!" * 1_000_000, "Content-Transfer-Encoding: base64"),
    "a long field": part("purpose", b"batch" * 200_000),
    "nothing": b"",
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_hostile_form_is_refused_after_bounded_work(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """aiohttp reads lines without a pause as long as it has data: their number is what stops the event loop."""
    lines, readline = 0, aiohttp.StreamReader.readline

    async def counted(self: aiohttp.StreamReader, **settings: int) -> bytes:
        nonlocal lines
        lines += 1
        return await readline(self, **settings)

    storage = Folder(tmp_path)
    async with serving(storage, tmp_path) as http:
        monkeypatch.setattr(aiohttp.StreamReader, "readline", counted)
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        async with http.post("/v1/files", data=FORMS[form] + END, headers=headers) as answer:
            assert answer.status == 400, await answer.text()
            error = (await answer.json())["error"]
        assert error["type"] == "invalid_request_error" and 20 < len(error["message"]) < 600
        listed = (await (await http.get("/v1/files")).json())["data"]
    assert lines < 600 and [file["id"] for file in listed] == ["file-in"]
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
    assert not list((tmp_path / "files").glob("*.part"))


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "multipart/form-data", "multipart/mixed; boundary=b0undary", "multipart/form-data; boundary="]
)
async def test_a_body_of_another_type_is_refused(tmp_path: Path, content_type: str) -> None:
    async with serving(Folder(tmp_path), tmp_path) as http:
        headers = {"content-type": content_type}
        async with http.post("/v1/files", data=PURPOSE + CONTENT + END, headers=headers) as answer:
            assert answer.status == 400 and "multipart/form-data" in (await answer.json())["error"]["message"]


async def test_a_form_in_tiny_packets_is_written_in_large_pieces(tmp_path: Path) -> None:
    """Each write is a step of a thread, or a request to a bucket."""
    written: list[int] = []

    class Counted(Folder):
        async def upload(self, name: str) -> Upload:
            upload = await super().upload(name)
            write = upload.write

            async def counted(data: bytes) -> None:
                written.append(len(data))
                await write(data)

            upload.write = counted  # type: ignore[method-assign]
            return upload

    async def packets() -> AsyncIterator[bytes]:
        body = PURPOSE + part("file", b"{}\n" * 20_000) + END
        for at in range(0, len(body), 97):
            yield body[at : at + 97]

    async with serving(Counted(tmp_path), tmp_path) as http:
        headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        async with http.post("/v1/files", data=packets(), headers=headers) as answer:
            assert answer.status == 200 and (await answer.json())["bytes"] == 60_000
    assert written == [60_000]


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (BatchLimits(max_files=2), "too_many_files"),
        (BatchLimits(max_batches=1), "too_many_batches"),
        (BatchLimits(max_stored_bytes=15_000), "storage_limit_exceeded"),
    ],
)
async def test_a_tenant_that_stores_as_much_as_it_may_stops_no_other(tmp_path: Path, limits: BatchLimits, code: str) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    form = PURPOSE + part("file", b"x" * 8000) + END
    async with serving(Folder(tmp_path), tmp_path, limits=limits, size=100) as http:
        assert (await http.post("/v1/batches", json=NEW)).status == 200
        for _ in range(2):
            answer = await http.post("/v1/files", data=form, headers=headers)
        assert answer.status == 400 and (await answer.json())["error"]["code"] == code
        assert (await http.post("/v1/files", data=form, headers=headers | {"x-fairlead-tenant": "anna"})).status == 200


async def test_uploads_of_a_tenant_at_the_same_time_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 1)
    headers, goes_on = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield CONTENT
        await goes_on.wait()
        yield PURPOSE + END

    async with serving(Folder(tmp_path), tmp_path) as http:
        first = asyncio.create_task(http.post("/v1/files", data=slowly(), headers=headers))
        await eventually(lambda: bool(list((tmp_path / "files").glob("*.part"))), "it is received")
        for tenant, status in (("", 429), ("anna", 200)):
            answer = await http.post("/v1/files", data=PURPOSE + CONTENT + END, headers=headers | {"x-fairlead-tenant": tenant})
            assert answer.status == status, tenant
        goes_on.set()
        assert (await first).status == 200


async def test_lists_and_their_cursors_show_a_tenant_its_own_objects_only(tmp_path: Path) -> None:
    async with serving(Folder(tmp_path), tmp_path) as http:
        other = {"x-fairlead-tenant": "anna"}
        batch = (await (await http.post("/v1/batches", json=NEW)).json())["id"]
        for path, id in (("/v1/files", "file-in"), ("/v1/batches", batch)):
            own = await (await http.get(path)).json()
            assert [each["id"] for each in own["data"]] == [id] and not own["has_more"]
            hidden = await (await http.get(path, headers=other)).json()
            assert hidden["data"] == [] and not hidden["has_more"]
            for order in ("asc", "desc"):
                async with http.get(path, params={"after": id, "order": order}, headers=other) as answer:
                    unknown = (await answer.text()).replace(id, "file-0")
                    assert answer.status == 400
                async with http.get(path, params={"after": "file-0", "order": order}, headers=other) as answer:
                    assert unknown == await answer.text(), "as for an id that does not exist"
        for method, path in (
            ("POST", f"/v1/batches/{batch}/cancel"),
            ("GET", "/v1/files/file-in/content"),
            ("DELETE", "/v1/files/file-in"),
        ):
            assert (await http.request(method, path, headers=other)).status == 404
        assert (await http.post("/v1/batches", json=NEW, headers=other)).status == 404, "nor does a batch read it"


@pytest.mark.parametrize(
    "head", ["HTTP/2.0\r\nhost: x", "HTTP/0.9\r\nhost: x", "HTTP/1.1\r\nhost: x\r\nauthorization: a\r\nauthorization: b"]
)
async def test_a_head_that_two_servers_may_read_differently_is_refused(tmp_path: Path, head: str) -> None:
    async with serving(Folder(tmp_path), tmp_path) as http:
        reader, writer = await asyncio.open_connection(http.host, http.port)
        writer.write(f"GET /v1/files {head}\r\n\r\n".encode())
        assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"400"
        writer.close()
