"""The compiled library as Python functions, if there is one for this machine."""

import ctypes
import functools
import logging
import platform
from pathlib import Path
from typing import Any

import torch

from fairlead_worker.native.build import LEVELS, LIBRARY, current
from fairlead_worker.platform import isa

LOWEST = next(iter(LEVELS), "")
"""The CPU level (`fairlead_worker.platform.isa`) below which there are no kernels; empty if this machine type has none."""

logger = logging.getLogger(__name__)


class NativeLibrary:
    """The library's functions by name. A function compiled for several CPU levels resolves to this process's level."""

    def __init__(self, functions: ctypes.CDLL, level: str) -> None:
        self._functions, self.level = functions, level

    def __getattr__(self, name: str) -> Any:
        """Return the function, the same object at each access. Raises AttributeError."""
        found = getattr(self._functions, f"{name}_{self.level}", None) or getattr(self._functions, name)
        setattr(self, name, found)
        return found


@functools.cache
def native() -> NativeLibrary | None:
    """Return the library, loaded once; None, with one warning that gives the reason, if the engine must use torch.

    Import it after torch, whose OpenMP runtime it uses. Pointers are `tensor.data_ptr()`; the caller keeps the tensors alive.
    """
    level = isa.cpu_level()
    if not LEVELS:
        logger.warning("no native kernels for %s; torch computes instead, and slower", platform.machine())
        return None
    if not isa.at_least(LOWEST):
        logger.warning("no native kernels at CPU level %s: they need %s; torch computes instead, and slower", level, LOWEST)
        return None
    if not LIBRARY.exists():
        logger.warning("no native kernels: %s is not there; `python -m fairlead_worker.native.build` makes it (needs gcc)", LIBRARY.name)
        return None
    if not current():
        logger.warning("no native kernels: %s was built from other sources; run `python -m fairlead_worker.native.build`", LIBRARY.name)
        return None
    try:
        show_openmp(Path(torch.__file__).parent / "lib")
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        logger.warning("no native kernels: %s", error)
        return None
    if level == "amx":
        if library.fairlead_use_amx():
            logger.info("bfloat16 linear layers use AMX")
        else:
            logger.warning("this CPU has AMX, and it cannot be used (a kernel before Linux 5.16, or a seccomp profile?): AVX512 instead")
    return NativeLibrary(library, level if level in LEVELS else list(LEVELS)[-1])


def show_openmp(libraries: Path) -> None:
    """Let our library find the functions of torch's OpenMP runtime. `libraries`: torch's folder of shared libraries.

    Our library names no OpenMP runtime of its own, because two of them would each start threads. On x86 torch shows its runtime to all
    libraries. On Arm it does not (seen with torch 2.15): loading ours failed with `undefined symbol: omp_get_thread_num`.
    """
    for library in sorted(libraries.glob("libgomp*.so*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    """Return the address of the tensor's first element. The tensor must be contiguous as the callee expects, and must outlive the call."""
    return ctypes.c_void_p(tensor.data_ptr())
