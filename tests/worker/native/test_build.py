"""The library: how it is built and found, and what happens without it."""

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.models import build_model

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model import loader, packed, plan
from fairlead_worker.model.packed import can_pack, pack_linears
from fairlead_worker.native import build, library
from fairlead_worker.platform import isa
from fairlead_worker.platform.isa import at_least

needs_compiler = pytest.mark.skipif(
    platform.machine() != "x86_64" or not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler for x86-64"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of native/ without the library, used in its place. Compiled for one CPU level without optimisation, a tenth of the time: what
    is tried here is how the library is built, and the other tests have the real one."""
    copy = tmp_path / "native"
    shutil.copytree(build.HERE, copy, ignore=shutil.ignore_patterns("libfairlead.*", "__pycache__"))
    script = (copy / "build.py").read_text()
    every, one = "LEVELS = MACHINES.get(platform.machine(), {})", 'LEVELS = {"avx2": AVX2}'
    assert '"-O3"' in script and every in script
    (copy / "build.py").write_text(script.replace('"-O3"', '"-O0"').replace(every, one))
    monkeypatch.setattr(build, "LEVELS", {"avx2": build.AVX2})
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    monkeypatch.setattr(build, "HERE", copy)
    monkeypatch.setattr(build, "SOURCES", copy / "src")
    monkeypatch.setattr(build, "STAMP", copy / "libfairlead.key")
    for module in (build, library):
        monkeypatch.setattr(module, "LIBRARY", copy / "libfairlead.so")
    return copy


@pytest.fixture
def load(folder: Path) -> Callable[[], object]:
    """`native()` without what it remembers."""
    return library.native.__wrapped__


@needs_compiler
@pytest.mark.skipif(not at_least(library.LOWEST), reason="this CPU level has no kernels")
def test_where_the_library_can_run_it_does() -> None:
    """The tests of the kernels are skipped without it, so a build that fails here must not go by in silence."""
    assert library.native() is not None, "run `python -m fairlead_worker.native.build` and see what it says"


@needs_compiler
def test_the_library_is_built_once_and_again_when_a_source_changes(
    folder: Path, load: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    """With its progress, as it takes up to a minute, in which `uv build` would show nothing; and without an OpenMP runtime."""
    caplog.set_level(logging.INFO)
    assert build.build()
    told, *steps = caplog.messages
    assert told.startswith("compiling the native library for avx2 with ") and told.endswith(": up to a minute")
    assert steps == ["1 of 2: base compiled", "2 of 2: avx2 compiled"]
    assert b"libgomp" not in build.LIBRARY.read_bytes()
    first = build.LIBRARY.stat()
    assert build.build()
    assert build.LIBRARY.stat().st_mtime_ns == first.st_mtime_ns
    with (folder / "src" / "team.c").open("a") as source:
        source.write("/* changed */\n")
    assert load() is None  # stale
    assert build.build()
    assert build.LIBRARY.stat().st_ino != first.st_ino
    assert sorted(path.name for path in folder.glob("libfairlead.*")) == ["libfairlead.key", "libfairlead.so"]


@needs_compiler
def test_builds_at_the_same_time_do_no_harm(folder: Path) -> None:
    builds = [subprocess.Popen([sys.executable, str(folder / "build.py")]) for _ in range(2)]
    assert [each.wait(120) for each in builds] == [0, 0]
    assert build.current()
    assert sorted(path.name for path in folder.glob("libfairlead.*")) == ["libfairlead.key", "libfairlead.so"]


def test_without_a_compiler_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("PATH", "/nowhere")
    assert not build.build()
    assert "no C compiler" in caplog.text and "install gcc" in caplog.text


@needs_compiler
def test_sources_that_do_not_compile_leave_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "src" / "team.c").write_text("this is no C\n")
    assert not build.build()
    assert "failed: the engine runs on torch alone" in caplog.text
    assert not list(folder.glob("libfairlead.*"))


def test_a_folder_that_may_not_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.os, "access", lambda *_: False)  # root may write anywhere
    assert not build.build()
    assert f"{folder} may not be written" in caplog.text


def test_no_build_for_another_machine(folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(build, "LEVELS", {})
    assert not build.build()
    assert "no native kernels for riscv64" in caplog.text


def test_without_the_library_one_line_says_how_to_get_it(
    load: Callable[[], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "cpu_level", lambda: library.LOWEST)
    assert load() is None
    assert [record.message for record in caplog.records] == [
        "no native kernels: libfairlead.so is not there; `python -m fairlead_worker.native.build` makes it (needs gcc)"
    ]


def test_a_cpu_level_without_kernels_is_named(
    load: Callable[[], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "cpu_level", lambda: "none")
    assert load() is None
    assert "no native kernels at CPU level none" in caplog.text


@needs_compiler
def test_what_is_no_library_is_not_loaded(
    load: Callable[[], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.LIBRARY.write_bytes(b"nonsense")
    build.STAMP.write_text(build.key())
    monkeypatch.setattr(isa, "cpu_level", lambda: library.LOWEST)
    assert load() is None
    assert "no native kernels" in caplog.text


def test_without_library_and_onednn_layers_stay_plain(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(packed, "native", lambda: None)
    monkeypatch.setattr(packed, "can_pack", lambda _: False)
    with caplog.at_level(logging.WARNING):
        assert pack_linears(build_model("llama")) == 0
    assert "oneDNN cannot pack" in caplog.text


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_refused_where_they_cannot_be(quantization: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)
    for changes, words in [
        ({"dtype": "float16"}, "not float16"),
        *([({"device": "cuda"}, "for CPUs, and this is cuda")] if quantization == "int8" else []),
        ({}, "native library"),
    ]:
        if not changes or library.native() is None:
            monkeypatch.setattr(plan, "native", lambda: None)
            words = "native library" if changes.get("device") != "cuda" else words
        with pytest.raises(ModelLoadError, match=words):
            loader.load_model(str(tmp_path), quantization=quantization, **changes)


@pytest.mark.skipif(library.native() is None, reason="the native library is not built, or not for this CPU")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_is_loaded_with_rounded_weights(quantization: str, tmp_path: Path) -> None:
    build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = loader.load_model(str(tmp_path), quantization=quantization).model
    assert model.model.layers[0].self_attn.o_proj.quantization == quantization
    assert model.lm_head.quantization == "int8"


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
def test_torchs_openmp_is_shown_to_the_library_also_where_torch_keeps_it_to_itself(tmp_path: Path) -> None:
    """As on Arm: a runtime that is loaded for one library only, and ours that uses its functions and does not name it."""
    compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    (tmp_path / "lib").mkdir()
    runtime, ours = tmp_path / "lib" / "libgomp.so.1", tmp_path / "ours.so"
    for target, source in (
        (runtime, "int omp_of_test(void) { return 7; }"),
        (ours, "int omp_of_test(void); int f(void) { return omp_of_test(); }"),
    ):
        source_file = tmp_path / f"{target.stem}.c"
        source_file.write_text(source)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source_file)], check=True)
    ctypes.CDLL(str(runtime))
    with pytest.raises(OSError, match="undefined symbol: omp_of_test"):
        ctypes.CDLL(str(ours), mode=os.RTLD_NOW)
    library.show_openmp(tmp_path / "lib")
    assert ctypes.CDLL(str(ours), mode=os.RTLD_NOW).f() == 7
