"""Choice of the attention backend, by name or by device."""

from collections.abc import Callable

from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.cpu import CpuBackend
from fairlead_worker.kernels.flashinfer import FlashInferBackend
from fairlead_worker.kernels.flashinfer_library import library
from fairlead_worker.kernels.flashinfer_support import unsupported
from fairlead_worker.kernels.native import NativeBackend, serves
from fairlead_worker.kernels.reference import ReferenceBackend
from fairlead_worker.native.library import native

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
    chosen = backend_name(name, spec)
    if spec.scales is not None and chosen in ("native", "cpu"):
        raise ValueError(
            "--kv-cache-dtype fp8 is for GPUs, and this is a CPU: leave it out, or try it with --attention-backend reference, which is slow"
        )
    if chosen not in BACKENDS:
        raise ValueError(
            f"attention backend {name!r} is not available here; set --attention-backend to one of: auto, {', '.join(BACKENDS)}"
        )
    return BACKENDS[chosen](spec, pages)


def backend_name(name: str, spec: KVSpec) -> str:
    """Return the name of the backend that `make_backend` makes."""
    return choose_backend(spec)[0] if name == "auto" else name


def choose_backend(spec: KVSpec, has_flashinfer: bool | None = None) -> tuple[str, str]:
    """Return the best backend for `spec`, and why it is not a faster one, for some layers or for all; empty: nothing is faster.

    has_flashinfer: None: whether it is installed here.
    """
    if spec.device.type == "cpu":
        if serves(spec):
            return "native", ""
        return "cpu", f"the compiled kernels are for float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}" if native() else (
            "the native library does not load here, see the log"
        )
    reasons = [unsupported(kind, spec.dtype, spec.scales is not None) for kind in spec.layers]
    refused = sorted(set(filter(None, reasons)))
    if not all(reasons) and (library() is not None if has_flashinfer is None else has_flashinfer):
        some = (
            f"{sum(map(bool, reasons))} of {len(reasons)} layers use the slow reference: FlashInfer does not support {', '.join(refused)}"
        )
        return "flashinfer", some if refused else ""
    return "reference", f"FlashInfer does not support {', '.join(refused)}" if all(reasons) else "FlashInfer is not installed"
