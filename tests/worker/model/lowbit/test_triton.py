"""Triton's kernels compute what plain torch does, in Triton's interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from bench.common.report import ROOT

from fairlead_worker.kernels import prebuild
from fairlead_worker.kernels.prebuild import build_triton_driver

pytest.importorskip("triton", reason="torch's wheels have it on Linux")


def test_kernels_compute_what_torch_does() -> None:
    program = [sys.executable, "-m", "tests.worker.model.lowbit.interpreted"]
    done = subprocess.run(program, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_build_compiles_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU image has no compiler, which Triton looks for at its first kernel."""
    import triton

    from fairlead_worker.model.lowbit.kernels import rows

    folder = tmp_path / "backends" / "nvidia"
    shutil.copytree(prebuild.triton_driver().parent, folder, ignore=shutil.ignore_patterns("bin", "__pycache__", "*.bc", "*.so"))
    driver = folder / prebuild.triton_driver().name
    monkeypatch.setattr(prebuild, "triton_driver", lambda: driver)
    monkeypatch.setattr(rows, "triton_driver", lambda: driver)
    monkeypatch.setattr(triton.knobs.build, "impl", None)
    rows.use_prebuilt_driver()
    assert getattr(triton.knobs.build, "impl") is None, "without one Triton compiles it"  # noqa: B009  # mypy would narrow it
    subprocess.run(["gcc", "-shared", "-o", tmp_path / "libcuda.so", "-xc", "/dev/null"], check=True, timeout=60)
    assert build_triton_driver(tmp_path) == driver and b"PyInit_cuda_utils" in driver.read_bytes()
    rows.use_prebuilt_driver()
    assert triton.knobs.build.impl("cuda_utils", "driver.c", "", [], [], []) == str(driver)
