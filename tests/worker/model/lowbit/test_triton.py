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


@pytest.mark.parametrize(
    ("capability", "form", "rounded"),
    [(80, "rows", False), (89, "blocks", True), (90, "rows", True), (90, "groups", False)],
)
def test_products_of_experts_compile(capability: int, form: str, rounded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile, within the shared memory that a program of each GPU has."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fairlead_worker.model.lowbit.kernels import experts

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, narrow = experts._multiply, "*fp8e4nv" if rounded else "*u8"
    types = {"inputs": "*fp8e4nv" if rounded else "*bf16", "weight": narrow, "out": "*bf16", "order": "*i64", "ends": "*i32"}
    types |= {"input_scale": "*fp32", "weight_scale": "*u8" if form == "groups" else "*fp32"}
    for tile in experts.TILES:
        given = {
            "BLOCKS": form == "blocks",
            "GROUPS": form == "groups",
            "ROUNDED": rounded,
            "EXPERTS": 128,
            "ROWS": tile.rows,
            "COLUMNS": experts.OUTPUTS,
            "STEP": experts.INPUTS,
        }
        signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()})
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert made.asm["cubin"] and made.metadata.shared <= (99 << 10 if capability < 90 else 227 << 10)


@pytest.mark.parametrize("grouped", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("capability", [89, 90])
def test_kernels_compile_for_gpus_that_multiply_float8(
    capability: int, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton and its ptxas need no device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fairlead_worker.model.lowbit.kernels import rows

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    results = {"out": "*fp8e4nv", "scales": "*fp32", "width": "i32", "stride": "i32", "eps": "fp32"}
    constants = {"BLOCK": 1024, "GROUPED": grouped, "PLUS": 1.0}
    for kernel, kinds in ((rows._round_rows, (None,)), (rows._add_norm_rows, (None,)), (rows._gated_rows, rows.KINDS.values())):
        for kind in kinds:
            given = {name: value for name, value in (constants | {"KIND": kind}).items() if name in kernel.arg_names}
            signature = {name: "constexpr" if name in given else results.get(name, "*bf16") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()})
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
            assert made.asm["cubin"]


@pytest.mark.parametrize(("group", "rows"), [(32, 16), (256, 64)])
def test_kernels_of_4_bits_compile(group: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fairlead_worker.model.lowbit.kernels import int4

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"rows": "*bf16", "weight": "*i32", "pairs": "*i32", "out": "*bf16", "count": "i32", "outputs": "i32", "inputs": "i32"}
    widening = {"GROUP": group, "TILES": 8, "OUTPUTS": int4.OUTPUTS, "INPUTS": int4.INPUTS}
    multiplying = {"GROUP": group, "GROUPS": max(128 // group, 1), "ROWS": rows, "OUTPUTS": 32}
    for kernel, given in ((int4._widen, widening), (int4._multiply, multiplying)):
        signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in given.items()})
        for capability in (80, 90):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "num_stages": 4})
            assert made.asm["cubin"] and made.metadata.shared < 160 << 10, "an A100 has 163 KiB of shared memory"
