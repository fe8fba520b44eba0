"""`make gpu-compile`: what is read from the compiler, what fails, and what is not compiled again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from bench.gpu import kernels
from bench.gpu.kernels import CompilerError, Kernel, Source, above, compile_source, label, parse, summarize

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3addPfS_' for 'sm_80'
ptxas info    : Function properties for _Z3addPfS_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 368 bytes cmem[0]
ptxas info    : Compile time = 3.2 ms
ptxas info    : Compiling entry function '_Z3addPfS_' for 'sm_90a'
ptxas info    : Function properties for _Z3addPfS_
    64 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 4096 bytes smem
"""
MUCH = """
extern "C" __global__ void __launch_bounds__(1024) many(const float* in, float* out) {
  float kept[160];
#pragma unroll
  for (int i = 0; i < 160; ++i) kept[i] = in[threadIdx.x + i * 4096];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 160; ++i) out[threadIdx.x + i * 4096] = kept[i] * kept[(i * 7) % 160];
}
"""


def test_kernels_are_read_from_the_output_of_ptxas() -> None:
    assert parse(PTXAS) == [Kernel("add", "sm_80", 12, 0, 0), Kernel("add", "sm_90a", 255, 40, 4096)]


def test_more_spills_than_allowed_are_an_error_and_others_are_not() -> None:
    rows = summarize({Source("norm", Path("norm.cu"), (), ""): parse(PTXAS)})
    assert [row["spilled"] for row in rows] == [0, 40]
    (line,) = above(rows, {})
    assert line.startswith("norm sm_90a: 1 kernels spill, at most 40 bytes a thread (add)") and "--accept" in line
    assert list(above(rows, {"norm sm_90a": {"kernels": 1, "bytes": 40}})) == []
    assert len(list(above(rows, {"norm sm_90a": {"kernels": 1, "bytes": 39}}))) == 1
    assert len(list(above(rows, {"norm sm_90a": {"kernels": 0, "bytes": 40}}))) == 1


def test_modules_have_short_names() -> None:
    long = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_256_head_dim_vo_256_posenc_0"
    assert label(f"{long}_use_swa_True_use_logits_cap_False_f16qk_False_kv_stride_equal") == "prefill bf16 256 window"
    fa3 = long.replace("kv_bf16", "kv_e4m3") + "_use_swa_False_use_logits_cap_True_f16qk_False_sm90"
    assert label(fa3) == "prefill bf16 256 e4m3 KV cap fa3"
    assert label("page") == "page"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A kernel that needs more than the 64 registers which 1,024 threads leave it, for nvcc."""
    if problem := kernels.ENVIRONMENT.install():
        pytest.skip(f"nvcc cannot be installed here: {problem}")
    nvcc = kernels.site() / "nvidia" / "cu13" / "bin" / "nvcc"
    monkeypatch.setattr(kernels, "ENVIRONMENT", SimpleNamespace(folder=tmp_path))
    path = tmp_path / "many.cu"
    path.write_text(MUCH)
    command = (str(nvcc), "-c", str(path), "-gencode=arch=compute_90a,code=sm_90a", "-o", "many.o")
    return Source("many", path, command, "many.o")


def test_a_kernel_that_spills_is_found_and_compiled_once(source: Source) -> None:
    compiled, seconds = compile_source(source)
    assert seconds > 0 and [kernel.name for kernel in compiled] == ["many"]
    assert compiled[0].registers <= 64 and compiled[0].spilled > 0
    assert list(above(summarize({source: compiled}), {}))
    assert compile_source(source) == (compiled, 0.0)
    source.path.write_text(MUCH.replace("160", "8"))
    changed, seconds = compile_source(source)
    assert seconds > 0 and changed[0].spilled == 0


def test_a_kernel_that_does_not_compile_is_an_error_with_the_compilers_words(source: Source) -> None:
    source.path.write_text(MUCH.replace("__syncthreads()", "__syncthread()"))
    with pytest.raises(CompilerError, match=r"many: many\.cu does not compile:(?s:.*)__syncthread"):
        compile_source(source)
