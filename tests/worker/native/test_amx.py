"""Linear layers by AMX's tiles on any CPU: plain C replaces the instructions, everything else is the library's own code."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.worker.native.test_linear import ROWS, SHAPES, SUMMED, error, make

from fairlead_worker.native import build
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import Linear, NativeLinear
from fairlead_worker.platform.isa import at_least

pytestmark = pytest.mark.skipif(
    not at_least("avx512_bf16") or native() is None or not shutil.which("gcc"),
    reason="no gcc, or a CPU without the AVX512-BF16 that stands beside AMX's tiles",
)
STAND_IN = Path(__file__).with_name("amx_stand_in.h")
KINDS = {torch.float32: 0, torch.bfloat16: 1}
Made = Callable[[int], ctypes.CDLL]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The library with the stand-in; broken: as its header says. Only `amx.c` has it, so the rest is compiled once."""
    folder = tmp_path_factory.mktemp("amx")
    compiler = ["gcc", *(flag for flag in build.FLAGS if flag != "-O3"), "-O1", *build.LEVELS["avx512_bf16"]]
    rest = [str(build.SOURCES / f"{name}.c") for name in ("blocks", "gemm", "pack", "round", "team", "tile", "tile_blocks", "unpack")]
    subprocess.run([*compiler, "-c", *rest], check=True, cwd=folder)
    objects = [str(path) for path in folder.glob("*.o")]

    def compiled(broken: int) -> ctypes.CDLL:
        flags = [f'-DFAIRLEAD_AMX_STAND_IN="{STAND_IN}"', f"-DAMX_BROKEN={broken}"]
        library = str(folder / f"amx{broken}.so")
        subprocess.run([*compiler, *flags, "-shared", str(build.SOURCES / "amx.c"), *objects, "-lm", "-o", library], check=True)
        return ctypes.CDLL(library)

    return compiled


@pytest.fixture(scope="module")
def library(made: Made) -> ctypes.CDLL:
    library = made(0)
    assert library.fairlead_use_amx() == 1
    return library


def product(library: ctypes.CDLL, layer: NativeLinear, x: torch.Tensor, threads: int = 2) -> torch.Tensor:
    call = library.fairlead_linear
    number, wide, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    call.argtypes = [number, ctypes.POINTER(Linear), pointer, wide, wide, pointer, wide, number]
    y = torch.full((len(x), layer.out_features), torch.nan, dtype=x.dtype)
    call(threads, layer.native, x.data_ptr(), x.stride(0), len(x), y.data_ptr(), y.stride(0), KINDS[x.dtype])
    return y


@pytest.mark.parametrize(("inputs", "outputs"), [*SHAPES, (32, 32), (96, 65)])
def test_sums_are_those_of_float64_and_a_rows_bits_its_own(library: ctypes.CDLL, inputs: int, outputs: int) -> None:
    """Inputs that fill no tile are multiplied as without AMX; rows are looked at among others that would be seen if they were mixed up."""
    weight, added = make(inputs, outputs, torch.bfloat16)
    layer = NativeLinear(weight, added)
    every = torch.randn(max(ROWS), inputs + 7).bfloat16()[:, :inputs]
    answers = []
    for rows in [*ROWS, 16, 17, 32, 33, 48, 49]:
        answers.append(product(library, layer, every[:rows]))
        want = every[:rows].double() @ weight.double().T + added.double()
        assert error(answers[-1], want) <= SUMMED[torch.bfloat16], rows
    for some, others in pairwise(answers):
        both = min(len(some), len(others))
        assert torch.equal(some[:both], others[:both])


def test_numbers_that_are_none_stay_in_their_row(library: ctypes.CDLL) -> None:
    weight, _ = make(64, 40, torch.bfloat16)
    x = torch.randn(40, 64).bfloat16()
    x[3, 5], x[20, 33] = torch.nan, torch.inf
    answer = product(library, NativeLinear(weight, None), x)
    assert answer[3].isnan().all() and not answer[20].isfinite().any()
    assert answer[[row for row in range(40) if row not in (3, 20)]].isfinite().all()


def test_float32_does_without(library: ctypes.CDLL) -> None:
    weight, _ = make(129, 100, torch.float32)
    layer, x = NativeLinear(weight, None), torch.randn(13, 129)
    assert torch.equal(product(library, layer, x), layer(x))


@pytest.mark.parametrize("broken", [1, 2], ids=["not there", "wrong"])
def test_instructions_that_do_not_work_are_not_used(made: Made, broken: int) -> None:
    """And do not end the process that asks."""
    library = made(broken)
    weight, _ = make(96, 65, torch.bfloat16)
    layer, x = NativeLinear(weight, None), torch.randn(33, 96).bfloat16()
    before = product(library, layer, x)
    assert library.fairlead_use_amx() == 0
    assert torch.equal(product(library, layer, x), before)
    assert error(before, x.double() @ weight.double().T) <= SUMMED[torch.bfloat16]
