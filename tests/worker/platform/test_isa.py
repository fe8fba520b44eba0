"""The CPU level: what it is chosen from, and that it binds every library that computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.isa import problems
from transformers import AutoConfig

from fairlead_worker.model.dtype import choose_dtype
from fairlead_worker.platform import isa

ZEN4 = isa.NEEDED["avx512_bf16"] | {"fpu"}
LOOK = """
import torch
import fairlead_worker
from fairlead_worker.platform.isa import cpu_level
from fairlead_worker.model.packed import can_pack
print(cpu_level(), torch.backends.cpu.get_cpu_capability(), can_pack(torch.float32), can_pack(torch.bfloat16))
"""


@pytest.mark.parametrize("level", isa.LEVELS)
def test_a_cpu_has_the_highest_level_whose_flags_it_has(level: str) -> None:
    assert isa.choose_level("", isa.NEEDED[level] | {"fpu"}) == level


def test_a_lower_level_can_be_forced_and_a_higher_one_is_refused() -> None:
    assert [isa.choose_level(level, ZEN4) for level in isa.LEVELS[:-1]] == list(isa.LEVELS[:-1])
    with pytest.raises(isa.CpuLevelError, match=r"FAIRLEAD_CPU_ISA=amx .* lacks amx_bf16, amx_tile; set avx512_bf16 or lower"):
        isa.choose_level("amx", ZEN4)
    with pytest.raises(isa.CpuLevelError, match="FAIRLEAD_CPU_ISA=sse is no CPU level; set one of: none, avx2"):
        isa.choose_level("sse", ZEN4)


@pytest.mark.skipif("avx2" not in isa.cpu_flags(), reason="this CPU has no AVX2")
def test_a_forced_level_limits_torch_and_onednn() -> None:
    look = subprocess.run([sys.executable, "-c", LOOK], env=forced("avx2"), capture_output=True, text=True, check=True)
    assert look.stdout == "avx2 AVX2 True False\n"


def test_a_worker_refuses_a_level_that_is_none() -> None:
    command = [sys.executable, "-m", "fairlead_worker.main", "--model", "file:///nowhere", "--port", "0"]
    done = subprocess.run(command, env=forced("sse"), capture_output=True, text=True)
    assert done.returncode == 1 and "fairlead-worker: FAIRLEAD_CPU_ISA=sse is no CPU level" in done.stderr.splitlines()[-1]


def test_flags_come_from_cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert isa.cpu_flags(tmp_path) == {"fpu", "avx512f"}
    assert isa.cpu_flags(tmp_path / "none") == frozenset()


def forced(level: str) -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    limits = {name for each in isa.LIMITS.values() for name in each}
    return {name: value for name, value in os.environ.items() if name not in limits} | {isa.VARIABLE: level, "PYTHONPATH": paths}


@pytest.mark.parametrize(
    ("kernels", "products", "dtype"), [(True, False, "bfloat16"), (False, True, "bfloat16"), (False, False, "float32")]
)
def test_auto_is_float32_where_nothing_multiplies_bfloat16(
    kernels: bool, products: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlead_worker.model.dtype.native", lambda: object() if kernels else None)
    monkeypatch.setattr("fairlead_worker.model.dtype.multiplies_bfloat16", lambda: products)
    config = AutoConfig.for_model("llama", dtype="bfloat16")
    assert str(choose_dtype("file:///m", "auto", config, torch.device("cpu"))) == f"torch.{dtype}"


def test_each_skip_is_explained_by_the_cpu() -> None:
    explained, other = "skipped: Skipped: this CPU level has no kernels", "skipped: Skipped: no gcc"
    assert problems({"none": {"a": explained, "b": "passed"}, "avx2": {"a": explained}}) == []
    assert problems({"none": {"a": other}}) == [f"a is skipped at CPU level none for another reason than the CPU: {other}"]
    assert problems({"avx512": {"a": explained}}) == [f"a is skipped at CPU level avx512, which has all that it needs: {explained}"]
