"""The runner in this process, with a router that answers as the test says and a storage that fails as the test says."""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.batch.deployment import line, to_file
from tests.router.harness import eventually

from fairlead_router.batch.batch_run import BatchRun
from fairlead_router.batch.config import BatchLimits
from fairlead_router.batch.line_client import MAX_FAILURES, Answer, LineClient, Retry
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.pacing import ConcurrencyLimit, Slots
from fairlead_router.batch.records import BatchRecord, FileRecord
from fairlead_router.batch.runner import Runner
from fairlead_router.batch.storage.base import StorageError
from fairlead_router.batch.storage.folder import Folder, FolderLog
from fairlead_router.batch.store import Store
from fairlead_router.batch.validation import LineSplitter, decode_line
from fairlead_router.tenancy.shared_secret import SharedSecret

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OK = {"choices": [{"text": "a\nb"}]}


class Faults:
    """Which operations of the storage fail, as on a full disk. At most `left` do."""

    def __init__(self, seed: int, left: int) -> None:
        self.chance, self.left = random.Random(seed), left

    def strike(self) -> bool:
        if self.left and self.chance.random() < 0.4:
            self.left -= 1
            return True
        return False


FAULTS = Faults(0, 0)


def full() -> OSError:
    return OSError(28, "No space left on device")


class FailingLog(FolderLog):
    """A log whose appends fail with a part of the lines written, and whose sealing fails before or after its effect."""

    def _append(self, data: bytes) -> None:
        if FAULTS.strike():
            super()._append(data[: FAULTS.chance.randrange(len(data) + 1)])
            raise full()
        super()._append(data)

    def _seal(self, target: Path) -> int:
        if FAULTS.strike():
            raise full()
        size = super()._seal(target)
        if FAULTS.strike():
            raise full()
        return size


class FailingFolder(Folder):
    def log(self, name: str) -> FolderLog:
        return FailingLog(self._root, self._root / name, self._run)

    async def put(self, name: str, data: bytes) -> None:
        if FAULTS.strike():
            raise StorageError("full")
        await super().put(name, data)
        if FAULTS.strike():
            raise StorageError("full")


@asynccontextmanager
async def router(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def run_batch(
    root: Path,
    url: str,
    lines: list[dict[str, Any]],
    folder: type[Folder] = Folder,
    faults: int = 0,
    *,
    max_line_bytes: int = 1 << 20,
    **fields: Any,
) -> tuple[BatchRecord, list[dict[str, Any]]]:
    """Run one batch to its end. Return it with all result lines. `fields`: of its record."""
    limits = BatchLimits(max_line_bytes=max_line_bytes)
    FAULTS.left = 0  # an earlier batch may have ended before all of its faults
    storage = folder(root)
    store = Store(storage, limits)
    await store.load()
    data = to_file(lines)
    (root / "files" / "file-in").write_bytes(data)
    await store.add_file(FileRecord("file-in", "", "in", "batch", len(data), 1, 2**40))
    batch = BatchRecord("batch_1", "", "/v1/completions", "file-in", "24h", 1, 2**40, "file-out", "file-err", 2**30, **fields)
    await store.add_batch(batch)
    async with LineClient(url, SharedSecret("")) as client:
        runner = Runner(store, client, Slots(ConcurrencyLimit(8)), BatchMetrics(), lambda: None, 0.001)
        FAULTS.left = faults
        runner.start("batch_1")
        await eventually(lambda: store.batches["batch_1"].is_ended, "the batch ends")
        await runner.close()
    storage.close()
    files = [root / "files" / name for name in ("file-out", "file-err")]
    found = [json.loads(text) for file in files if file.exists() for text in file.read_text().splitlines()]
    return store.batches["batch_1"], found


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40))
@settings(max_examples=10, deadline=None)
def test_a_storage_that_fails_at_any_write_loses_and_repeats_no_line(seed: int, count: int) -> None:
    async def check(root: Path) -> None:
        FAULTS.chance = random.Random(seed)

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.json_response(OK, status=400 if (await request.json())["prompt"] == "bad" else 200)

        lines = [line(f"r{n}", prompt="bad" if n % 3 == 0 else "good") for n in range(count)]
        async with router(answer) as url:
            batch, found = await run_batch(root, url, lines, FailingFolder, faults=8)
        assert batch.status == "completed"
        assert sorted(each["custom_id"] for each in found) == sorted(f"r{n}" for n in range(count))
        assert (batch.completed, batch.failed) == (count - len(range(0, count, 3)), len(range(0, count, 3)))

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(check(Path(root)))


async def test_a_line_that_the_service_fails_on_fails_after_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.batch.line_client._backoff", lambda tries: 0.001)
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        if (await request.json())["prompt"] != "poison":
            return web.json_response(OK)
        sent += 1
        return web.json_response({"error": {"message": "workers ended"}}, status=502)

    async with router(answer) as url:
        batch, found = await run_batch(tmp_path, url, [line("a"), line("b", prompt="poison"), line("c")])
    assert (batch.status, batch.completed, batch.failed, sent) == ("completed", 2, 1, MAX_FAILURES)
    assert [each["response"]["status_code"] for each in found if each["custom_id"] == "b"] == [502]


class SlowFolder(Folder):
    """A storage whose logs write only when they may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()

    def log(self, name: str) -> FolderLog:
        return SlowLog(self, name)


class SlowLog(FolderLog):
    def __init__(self, folder: SlowFolder, name: str) -> None:
        super().__init__(folder._root, folder._root / name, folder._run)
        self._folder = folder

    async def append(self, lines: list[bytes]) -> None:
        self._folder.is_writing.set()
        await self._folder.may_write.wait()
        await super().append(lines)


async def test_lines_that_were_answered_before_a_batch_was_cancelled_are_counted(tmp_path: Path) -> None:
    """Also those whose results were not durable yet: their clients find them in the output file."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if (await request.json())["prompt"] == "slow":
            await storage.may_write.wait()
        return web.json_response(OK)

    data, storage, splitter = to_file([line("fast"), line("slow", prompt="slow")]), SlowFolder(tmp_path), LineSplitter(1 << 20)
    list(splitter.feed(data, is_last=True))
    async with router(answer) as url, LineClient(url, SharedSecret("")) as client:
        store = Store(storage)
        await store.load()
        (tmp_path / "files" / "file-in").write_bytes(data)
        batch = BatchRecord("batch_1", "", "/v1/completions", "file-in", "24h", 1, 2**40, "file-out", "file-err", 2**30, total=2)
        run = BatchRun(batch, splitter.index, store, client, Slots(ConcurrencyLimit(8)), BatchMetrics())
        running = asyncio.create_task(run.run())
        await storage.is_writing.wait()
        run.cancel()
        await eventually(lambda: not run._sending, "no line is sent any more")
        storage.may_write.set()
        assert await running == "cancelled"
    storage.close()
    assert (run.completed, run.failed) == (1, 0), "the line that was not executed did not fail"
    files = [tmp_path / "batches" / f"batch_1.{name}" for name in ("output", "errors")]
    assert [[json.loads(text)["custom_id"] for text in file.read_text().splitlines()] for file in files] == [["fast"], ["slow"]]


async def test_a_batch_that_continues_under_a_lower_limit_of_its_lines_loses_none(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(OK)

    lines = [line("short"), line("long", prompt="x" * 5000), line("last")]
    async with router(answer) as url:
        batch, found = await run_batch(tmp_path, url, lines, status="in_progress", total=3, max_line_bytes=1024)
    assert batch.completed == 3 and sorted(each["custom_id"] for each in found) == ["last", "long", "short"]


@pytest.mark.parametrize("status", [401, 403, 408, 409, 425, 429, 500, 502, 503, 504])
async def test_what_is_not_the_lines_fault_is_sent_again(tmp_path: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlead_router.batch.line_client._backoff", lambda tries: 0.001)
    refused: set[str] = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        id = request.headers["x-request-id"]
        if id in refused:
            return web.json_response(OK)
        refused.add(id)
        return web.json_response({"error": {"code": "x"}}, status=status)

    async with router(answer) as url:
        batch, found = await run_batch(tmp_path, url, [line(f"r{n}") for n in range(4)])
    assert batch.completed == 4 and {each["response"]["status_code"] for each in found} == {200}


async def send(url: str, failures: int = 0) -> Answer | Retry:
    text = json.dumps(line("a")).encode()
    async with LineClient(url, SharedSecret("")) as client:
        return await client.send("", "/v1/completions", "id-1", decode_line(text), 0, failures)


async def test_requests_name_their_class_and_answers_are_on_one_line() -> None:
    seen: list[web.Request] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(request)
        return web.Response(text=json.dumps(OK, indent=2), content_type="application/json", headers={"x-request-id": "r-9"})

    async with router(answer) as url:
        found = await send(url)
    assert found == Answer(200, "r-9", b'{"choices":[{"text":"a\\nb"}]}')
    headers = seen[0].headers
    assert headers["x-slo-class"] == "batch" and headers["x-fairlead-forwarding-mode"] == "proxy" and headers["x-request-id"] == "id-1"


async def test_a_quota_delays_its_tenant_only_and_retry_after_is_kept() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "rate_limit_exceeded"}}, status=429, headers={"retry-after": "7"})

    async with router(answer) as url:
        assert await send(url) == Retry(7.0, "HTTP 429", is_quota=True, is_failure=False)


async def test_an_answer_that_breaks_off_or_a_missing_router_is_a_reason_to_try_again() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await response.write(b'{"choices": [')
        assert request.transport is not None
        request.transport.close()
        return response

    async with router(answer) as url:
        broken = await send(url)
    assert isinstance(broken, Retry) and not broken.is_failure
    away = await send(url)
    assert isinstance(away, Retry) and not away.is_failure and not away.is_quota


async def test_a_secret_that_cannot_be_read_is_no_fault_of_the_line(tmp_path: Path) -> None:
    text = json.dumps(line("a")).encode()
    async with LineClient("http://127.0.0.1:1", SharedSecret(str(tmp_path / "none"))) as client:
        assert isinstance(await client.send("", "/v1/completions", "id", decode_line(text), 0, 0), Retry)


async def test_storage_errors_name_the_volume_and_the_fix(tmp_path: Path) -> None:
    folder = FailingFolder(tmp_path)
    await folder.open()
    FAULTS.chance, FAULTS.left = random.Random(1), 1
    with pytest.raises(StorageError, match="enlarge the volume, or delete files"):
        for _ in range(50):
            await folder.log("batches/x.output").append([b"{}"])
