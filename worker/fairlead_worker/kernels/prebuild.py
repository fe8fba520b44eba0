"""Compile FlashInfer's kernels ahead of time, with nvcc, in an image build: `python -m fairlead_worker.kernels.prebuild`.

The kernels go where FlashInfer looks first (`flashinfer/data/aot`). So a pod needs no compiler, and neither its start nor its first
request waits for one. The build needs no GPU: FLASHINFER_CUDA_ARCH_LIST names the target architectures ("9.0a 10.0a").
"""

import argparse
import importlib
import os
import shutil
import sys
from itertools import product
from pathlib import Path

import torch

from fairlead_worker.kernels.flashinfer_library import HEAD_DIMS

PARTS = ("flashinfer.aot", *(f"flashinfer.jit.{name}" for name in ("page", "norm", "rope", "activation")))
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""The activations of `fused.gated.ACTIVATIONS`, by FlashInfer's module names."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="prebuild", description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS), choices=HEAD_DIMS)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"], choices=("bfloat16", "float16"))
    parser.add_argument("--modules", nargs="+", metavar="NAME", help="only these, by the names that --list prints")
    parser.add_argument("--list", action="store_true", help="say which modules there are, and build nothing")
    given = parser.parse_args(arguments)
    specs = modules(given.head_dims, [getattr(torch, name) for name in given.dtypes])
    if unknown := [name for name in given.modules or () if name not in specs]:
        print(f"prebuild: there is no module {', '.join(unknown)}; --list prints the names", file=sys.stderr)
        return 2
    specs = {name: spec for name, spec in specs.items() if name in (given.modules or specs)}
    print(f"{len(specs)} modules", flush=True)
    if given.list:
        print("\n".join(specs))
        return 0
    if not os.environ.get("FLASHINFER_CUDA_ARCH_LIST"):
        print('prebuild: set FLASHINFER_CUDA_ARCH_LIST, as in "9.0a" for Hopper', file=sys.stderr)
        return 2
    importlib.import_module("flashinfer.jit").build_jit_specs(list(specs.values()), verbose=False, skip_prebuilt=True)
    environment = importlib.import_module("flashinfer.jit.env")
    for name in specs:
        built, target = Path(environment.FLASHINFER_JIT_DIR) / name / f"{name}.so", Path(environment.FLASHINFER_AOT_DIR) / name
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)
    print(f"in {environment.FLASHINFER_AOT_DIR}", flush=True)
    return 0


def modules(head_dims: list[int], dtypes: list[torch.dtype]) -> dict[str, object]:
    """Return the modules to build, by name.

    These are, for each layer kind, the prefill kernels, which also decode on tensor cores, and the other decode kernels; the kernel that
    stores KV; and the kernels of fused layers. Soft caps occur with and without a window (Gemma 2).
    """
    aot, page, norm, rope, activation = map(importlib.import_module, PARTS)
    specs = [page.gen_page_module(), norm.gen_norm_module(), rope.gen_rope_module()]
    specs += [activation.gen_act_and_mul_module(name) for name in ACTIVATIONS]
    for dim, dtype, window, softcap in product(head_dims, dtypes, (False, True), (False, True)):
        if softcap and dim == 64:
            continue  # no family has that
        specs += aot.gen_fa2(dtype, dtype, dim, dim, window, softcap)
    return {spec.name: spec for spec in specs}


if __name__ == "__main__":
    sys.exit(main())
