"""The durable log under crashes at any byte, files that exist whole or not at all, and what a start removes."""

import asyncio
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlead_router.batch.config import BatchLimits
from fairlead_router.batch.records import BatchRecord, FileRecord
from fairlead_router.batch.storage.base import StorageError
from fairlead_router.batch.storage.folder import Folder
from fairlead_router.batch.store import Store

TEXTS = st.lists(st.text(max_size=40), min_size=1, max_size=12)


def encode(texts: list[str]) -> list[bytes]:
    return [json.dumps({"id": text}).encode() for text in texts]


async def recovered(folder: Folder) -> list[bytes]:
    return [line async for line in folder.log("batches/b.output").recover()]


async def opened(root: Path) -> Folder:
    folder = Folder(root)
    await folder.open()
    return folder


@given(before=TEXTS, after=TEXTS, cut=st.integers(min_value=0), damage=st.sampled_from(["truncated", "zeros", "garbage"]))
@settings(deadline=None, max_examples=40)
def test_a_crash_at_any_byte_leaves_a_prefix_to_which_more_is_appended(before: list[str], after: list[str], cut: int, damage: str) -> None:
    """kill -9 truncates the last write. A power loss may leave zeros or old bytes in its place, and what follows it is lost too."""

    async def check(root: Path) -> None:
        folder = await opened(root)
        lines, more = encode(before), encode(after)
        await folder.log("batches/b.output").append(lines)
        path = root / "batches" / "b.output"
        data = path.read_bytes()
        at = cut % (len(data) + 1)
        rest = {"truncated": b"", "zeros": bytes(len(data) - at), "garbage": b"\x00\xff}\n" + data[at:]}[damage]
        path.write_bytes(data[:at] + rest)
        kept = data[:at].count(b"\n")
        log = folder.log("batches/b.output")
        found = [line async for line in log.recover()]
        assert found == lines[:kept]
        await log.append(more)
        assert await recovered(folder) == lines[:kept] + more
        folder.close()

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(check(Path(root)))


@given(batches=st.lists(TEXTS, max_size=5), crash=st.booleans())
@settings(deadline=None, max_examples=40)
def test_sealing_may_be_repeated(batches: list[list[str]], crash: bool) -> None:
    async def check(root: Path) -> None:
        folder = await opened(root)
        log = folder.log("batches/b.output")
        for texts in batches:
            await log.append(encode(texts))
        expected = b"".join(line + b"\n" for texts in batches for line in encode(texts))
        assert await log.seal("files/out") == len(expected)
        if crash:
            assert await folder.log("batches/b.output").seal("files/out") == len(expected)
        if expected:
            assert await folder.read("files/out", 0, 1 << 20) == expected
        folder.close()

    with tempfile.TemporaryDirectory() as root:
        asyncio.run(check(Path(root)))


async def test_an_upload_exists_once_it_is_complete(tmp_path: Path) -> None:
    folder = await opened(tmp_path)
    upload = await folder.upload("files/a")
    await upload.write(b"one")
    assert "a" not in await folder.names("files")
    await upload.commit()
    assert await folder.read("files/a", 0, 10) == b"one" and await folder.size("files/a") == 3
    aborted = await folder.upload("files/b")
    await aborted.write(b"x" * 100_000)
    await aborted.abort()
    assert await folder.names("files") == ["a"]
    with pytest.raises(StorageError, match="No such file"):
        await folder.read("files/b", 0, 1)


async def test_one_process_has_the_folder(tmp_path: Path) -> None:
    first = await opened(tmp_path)
    with pytest.raises(StorageError, match="only one may run"):
        await opened(tmp_path)
    first.close()
    await opened(tmp_path)


def batch_record(id: str, **fields: object) -> BatchRecord:
    times = {"created_at": 1, "expires_at": 2, "file_lifetime": 60}
    return BatchRecord(id, "anna", "/v1/completions", "file-in", "24h", output_id=f"file-{id}-o", error_id="file-e", **times, **fields)  # type: ignore[arg-type]


async def test_a_start_removes_what_no_record_refers_to_and_keeps_what_a_batch_will_need(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    store = Store(folder)
    await store.load()
    running, ended = batch_record("batch_1", status="finalizing", outcome="completed"), batch_record("batch_2", status="completed")
    await store.add_file(FileRecord("file-in", "anna", "in", "batch", 3, 1, 2**40))
    for name in ("file-in", "file-orphan", "file-batch_1-o", "file-x.part"):
        (tmp_path / "files" / name).write_bytes(b"abc")
    for batch in (running, ended):
        await store.add_batch(batch)
        await store.logs(batch)[0].append([b"{}"])
    folder.close()
    again = Store(Folder(tmp_path))
    await again.load()
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == ["file-batch_1-o", "file-in", "file-in.json"]
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["batch_1.json", "batch_1.output", "batch_2.json"]
    assert again.batches == {"batch_1": running, "batch_2": ended} and again.unfinished() == [running]
    assert again.stored_bytes("anna") == 3 and again.stored_bytes("boris") == 0


async def test_expired_files_and_old_batches_go_but_not_an_input_in_use(tmp_path: Path) -> None:
    store = Store(Folder(tmp_path), BatchLimits(retention=100))
    await store.load()
    for id in ("file-in", "file-old"):
        (tmp_path / "files" / id).write_bytes(b"abc")
        await store.add_file(FileRecord(id, "anna", "in", "batch", 3, 1, 1000))
    store.batches = {"batch_1": batch_record("batch_1"), "batch_2": batch_record("batch_2", status="completed", completed_at=950)}
    await store.remove_expired(1001)
    assert store.files.keys() == {"file-in"} and store.batches.keys() == {"batch_1", "batch_2"}
    await store.remove_expired(1051)
    assert store.batches.keys() == {"batch_1"} and store.stored_bytes("anna") == 3
