"""The CPU instruction set that the engine uses: the CPU's highest level, or the lower level set by `FAIRLEAD_CPU_ISA`.

All other modules get the level from here. A forced level limits torch, oneDNN and MKL too, so that a machine with AVX512 runs the same code
as one without it.
"""

import functools
import os
import platform
from collections.abc import Mapping, MutableMapping
from pathlib import Path

VARIABLE = "FAIRLEAD_CPU_ISA"
ARM = platform.machine() in ("aarch64", "arm64")
LEVELS = ("none", "neon", "neon_bf16") if ARM else ("none", "avx2", "avx512", "avx512_bf16", "amx")
"""From the lowest to the highest. `none`: torch computes everything, with any instructions that the CPU has."""
PRODUCTS = "neon_bf16" if ARM else "avx512_bf16"
"""The lowest level with products of bfloat16 in hardware."""
_AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "abm", "movbe", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}
_BFLOAT16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
NEEDED: Mapping[str, frozenset[str]] = {
    "none": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _BFLOAT16,
    "amx": _BFLOAT16 | {"amx_tile", "amx_bf16"},
    "neon": frozenset({"asimd"}),
    "neon_bf16": frozenset({"asimd", "asimddp", "bf16"}),
}
"""CPU flags that each level needs, in Linux's names."""
LIMITS: Mapping[str, Mapping[str, str]] = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
}
"""Environment variables that keep torch, oneDNN and MKL at a level. Arm has none: there a lower level limits only Fairlead's kernels."""


class CpuLevelError(ValueError):
    """`FAIRLEAD_CPU_ISA` names no level, or one that the CPU does not have. The message says what to set."""


def limit_libraries(environment: MutableMapping[str, str] | None = None) -> None:
    """Limit torch, oneDNN and MKL to the level that `FAIRLEAD_CPU_ISA` forces, in this process and its children.

    The libraries read these variables at their first matrix product, so this runs when `fairlead_worker` is imported. `cpu_level` reports
    an unknown level.
    """
    environment = os.environ if environment is None else environment
    environment.update(LIMITS.get(environment.get(VARIABLE, ""), {}))


@functools.cache
def cpu_level() -> str:
    """Return the level of this process, one of `LEVELS`. Raises CpuLevelError."""
    return choose_level(os.environ.get(VARIABLE, ""), cpu_flags())


def choose_level(forced: str, flags: frozenset[str]) -> str:
    """Return `forced` unless it is empty, else the highest level that a CPU with `flags` has. Raises CpuLevelError."""
    best = [level for level in LEVELS if flags >= NEEDED[level]][-1]
    if not forced:
        return best
    if forced not in LEVELS:
        raise CpuLevelError(f"{VARIABLE}={forced} is no CPU level; set one of: {', '.join(LEVELS)}, or leave it unset")
    if missing := sorted(NEEDED[forced] - flags):
        raise CpuLevelError(f"{VARIABLE}={forced} is above what this CPU has: it lacks {', '.join(missing)}; set {best} or lower")
    return forced


def at_least(level: str) -> bool:
    """Return whether the level of this process is `level` or a higher one."""
    return level in LEVELS and LEVELS.index(cpu_level()) >= LEVELS.index(level)


def multiplies_bfloat16() -> bool:
    """Return whether torch has bfloat16 products in hardware here: AVX512-BF16, AMX, or Arm's."""
    if cpu_level() == "none":
        return not cpu_flags().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
    return at_least(PRODUCTS)


@functools.cache
def cpu_flags(proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the features of the first CPU, in Linux's names. Empty if they cannot be read."""
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    name = "flags" if platform.machine() == "x86_64" else "Features"
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith(name)), frozenset())
