"""The compiled library as Python functions, where there is one for this machine."""

import ctypes
import functools
import logging
from pathlib import Path

import torch

from fairlead_worker.native.build import LIBRARY, current

NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"})
"""CPU flags without which the library must not be called."""
TILES = frozenset({"amx_tile", "amx_bf16"})
"""CPU flags with which bfloat16 linear layers are multiplied by AMX (`src/amx.c`)."""

logger = logging.getLogger(__name__)


@functools.cache
def native() -> ctypes.CDLL | None:
    """The library, loaded once; None, said once with the reason, where the engine has to do without.

    Imported after torch, whose OpenMP runtime it uses. Pointers are `tensor.data_ptr()`; the caller keeps the tensors alive.
    """
    if not LIBRARY.exists():
        logger.warning("no native kernels: %s is not there; `python -m fairlead_worker.native.build` makes it (needs gcc)", LIBRARY.name)
        return None
    if not current():
        logger.warning("no native kernels: %s was built from other sources; run `python -m fairlead_worker.native.build`", LIBRARY.name)
        return None
    missing = NEEDED - cpu_flags()
    if missing:
        logger.warning("no native kernels: this CPU lacks %s; linear layers use oneDNN", ", ".join(sorted(missing)))
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        logger.warning("no native kernels: %s", error)
        return None
    if cpu_flags() >= TILES:
        if library.fairlead_use_amx():
            logger.info("bfloat16 linear layers use AMX")
        else:
            logger.warning("this CPU has AMX, and it cannot be used (a kernel before Linux 5.16, or a seccomp profile?): AVX512 instead")
    return library


def cpu_flags(proc: Path = Path("/proc")) -> frozenset[str]:
    """What the first CPU can do, in Linux's names; empty where Linux does not say."""
    try:
        for line in (proc / "cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Where the tensor's first element is. The tensor must be contiguous as the callee expects, and must outlive the call."""
    return ctypes.c_void_p(tensor.data_ptr())
