"""The cache's own promises, without a source: one download at a time, no stale lock, and errors that name the fix."""

import errno
import fcntl
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import no_progress

URI = "s3://models/tiny"


def test_a_volume_that_fills_up_during_a_download_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match=r"is full \(.* GiB free\): enlarge the volume of spec\.model\.cache"),
        ModelCache(tmp_path).lock(URI, no_progress),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "model.safetensors"))


def test_a_volume_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ModelLoadError, match=r"may not be written by user .*: let spec\.model\.cache be writable for it"),
        ModelCache(tmp_path).lock(URI, no_progress),
    ):
        raise OSError(errno.EACCES, "Permission denied", str(tmp_path))


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), ModelCache(tmp_path).lock(URI, no_progress):
        assert "no file locks" in caplog.text


def test_a_killed_holders_lock_is_free_at_once(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from fairlead_worker.weights.cache import ModelCache\n"
        "from fairlead_worker.weights.progress import no_progress\n"
        "with ModelCache(Path(sys.argv[1]), 'gone').lock(sys.argv[2], no_progress): os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[3]
    environment = {"PYTHONPATH": f"{root / 'worker'}:{root / 'index'}:{root / 'common'}"}
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path), URI], env=environment, timeout=60).returncode == -9
    said: list[str] = []
    with ModelCache(tmp_path).lock(URI, lambda phase, *_: said.append(phase)):
        assert said == ["download"], "no waiting"


def test_only_what_is_whole_and_unchanged_counts_as_complete(tmp_path: Path) -> None:
    cache, folder = ModelCache(tmp_path / "cache"), tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100_000))
    assert not cache.is_complete(URI, folder) and not cache.is_damaged(URI, folder)
    cache.mark_complete(URI, folder)
    assert cache.is_complete(URI, folder) and not cache.is_complete("s3://models/other", folder)
    (folder / "model.safetensors").write_bytes(bytes(99_999))
    assert cache.is_damaged(URI, folder)
    (folder / "model.safetensors").unlink()
    assert cache.is_damaged(URI, folder)
