"""Compile FlashInfer's kernels ahead of time, with nvcc, in an image build: `python -m fairlead_worker.kernels.prebuild`.

The kernels go where FlashInfer looks first (`flashinfer/data/aot`). So a pod needs no compiler, and neither its start nor its first
request waits for one. The build needs no GPU: FLASHINFER_CUDA_ARCH_LIST names the target architectures ("9.0a 10.0a"). Triton's kernels
need no nvcc, but its driver is C code that Triton would compile in the pod: it is compiled here too, beside its source.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch

from fairlead_worker.kernels.base import FLOAT8
from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS, LATENT, ROTATED

PARTS = ("flashinfer.aot", *(f"flashinfer.jit.{name}" for name in ("page", "norm", "rope", "activation", "comm")))
CUDA_STUBS = Path("/usr/local/cuda/lib64/stubs")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The activations of `layers.mlp.KERNELS`, by FlashInfer's module names."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prebuild", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=("bfloat16", "float16"))
    parser.add_argument("--modules", nargs="+", metavar="NAME", help="only these, by the names that --list prints")
    parser.add_argument("--list", action="store_true", help="say which modules there are, and build nothing")
    given = parser.parse_args(arguments)
    targets = os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "")
    specs = modules(given.head_dims, [getattr(torch, name) for name in given.dtypes], hopper="9.0a" in targets)
    if unknown := [name for name in given.modules or () if name not in specs]:
        print(f"prebuild: there is no module {', '.join(unknown)}; --list prints the names", file=sys.stderr)
        return 2
    specs = {name: spec for name, spec in specs.items() if name in (given.modules or specs)}
    print(f"{len(specs)} modules", flush=True)
    if given.list:
        print("\n".join(specs))
        return 0
    if not targets:
        print('prebuild: set FLASHINFER_CUDA_ARCH_LIST, as in "9.0a" for Hopper', file=sys.stderr)
        return 2
    importlib.import_module("flashinfer.jit").build_jit_specs(list(specs.values()), verbose=False, skip_prebuilt=True)
    environment = importlib.import_module("flashinfer.jit.env")
    for name in specs:
        built, target = Path(environment.FLASHINFER_JIT_DIR) / name / f"{name}.so", Path(environment.FLASHINFER_AOT_DIR) / name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)
    print(f"in {environment.FLASHINFER_AOT_DIR}", flush=True)
    print(f"Triton's driver: {build_triton_driver(CUDA_STUBS)}", flush=True)
    return 0


def triton_driver() -> Path:
    """Return where Triton's compiled driver is, if it was compiled in the image build. Raises RuntimeError without Triton."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        raise RuntimeError("Triton is not installed")
    return Path(found.origin).parent / "backends" / "nvidia" / f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}"


def build_triton_driver(stubs: Path) -> Path:
    """Compile Triton's driver with gcc; return the file. stubs: a folder with a libcuda.so to link, as CUDA's development files have."""
    target = triton_driver()
    includes = [target.parent / "include", sysconfig.get_paths()["include"]]
    command = ["gcc", "-O3", "-shared", "-fPIC", "-o", target, target.parent / "driver.c", *(f"-I{each}" for each in includes)]
    subprocess.run([*map(str, command), f"-L{stubs}", "-lcuda"], check=True)
    return target


def modules(head_dims: list[int], dtypes: list[torch.dtype], hopper: bool) -> dict[str, object]:
    """Return the modules to build, by name. `hopper`: also fa3's, which are for Hopper alone.

    These are, for each layer kind, the prefill kernels, which also decode on tensor cores, and the other decode kernels; the former again
    for KV in float8; those for latents; the kernel that stores KV (that for float8 is among rope's); the kernels of fused layers, with the
    sum over ranks. Soft caps occur with and without a window (Gemma 2).
    """
    aot, page, norm, rope, activation, comm = map(importlib.import_module, PARTS)
    specs = [page.gen_page_module(), norm.gen_norm_module(), rope.gen_rope_module()]
    specs += [activation.gen_act_and_mul_module(name) for name in ACTIVATIONS]
    specs += [comm.gen_trtllm_comm_module()] if hopper else []
    specs += [aot.gen_batch_mla_module("fa2", dtype, dtype, dtype, torch.int32, LATENT, ROTATED, False) for dtype in dtypes]
    for dim, dtype, window, softcap in product(head_dims, dtypes, (False, True), (False, True)):
        if softcap and dim == 64:
            continue  # no family has that
        specs += aot.gen_fa2(dtype, dtype, dim, dim, window, softcap)
        if dtype == torch.bfloat16:  # what models that need a smaller KV cache compute in
            specs += aot.gen_fa2(dtype, FLOAT8, dim, dim, window, softcap, prefill_only=True)
            specs += aot.gen_fa3(dtype, dtype, dtype, dim, dim, window, softcap) if hopper else ()
    return {spec.name: spec for spec in specs}


if __name__ == "__main__":
    sys.exit(main())
