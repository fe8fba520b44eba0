"""Choice of the attention backend, by name or by device."""

from collections.abc import Callable

from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.flashinfer_library import library, unsupported
from fairlead_worker.kernels.native import NativeBackend, serves
from fairlead_worker.kernels.reference import ReferenceBackend

BACKENDS: dict[str, Callable[[KVSpec, int], Backend]] = {
    "flashinfer": FlashInferBackend,
    "native": NativeBackend,
    "cpu": CpuBackend,
    "reference": ReferenceBackend,
}


def make_backend(name: str, spec: KVSpec, pages: int) -> Backend:
    """Make the backend called `name` (`auto`: the best one for the device) with storage for `pages` pages.

    Raises ValueError for an unknown name, and for a backend that cannot serve here.
    """
    chosen = choose_backend(name, spec)
    if spec.scales is not None and chosen in ("native", "cpu"):
        raise ValueError(
            "--kv-cache-dtype fp8 is for GPUs, and this is a CPU: leave it out, or try it with --attention-backend reference, which is slow"
        )
    if chosen not in BACKENDS:
        raise ValueError(
            f"attention backend {name!r} is not available here; set --attention-backend to one of: auto, {', '.join(BACKENDS)}"
        )
    return BACKENDS[chosen](spec, pages)


def choose_backend(name: str, spec: KVSpec) -> str:
    """Return the name of the backend that `make_backend` makes."""
    return name if name != "auto" else _best(spec)


def _best(spec: KVSpec) -> str:
    if spec.device.type != "cpu":
        served = any(not unsupported(kind, spec.dtype) for kind in spec.layers)
        return "flashinfer" if served and library() is not None else "reference"
    return "native" if serves(spec) else "cpu"
