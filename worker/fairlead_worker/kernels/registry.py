"""Which backend serves: by name, or by the device."""

from fairlead_worker.kernels.base import Backend, KVSpec
from fairlead_worker.kernels.reference import ReferenceBackend

BACKENDS = {"reference": ReferenceBackend}


def make_backend(name: str, spec: KVSpec, pages: int) -> Backend:
    """The backend called `name` (`auto`: the best one here) with storage for `pages` pages. ValueError on an unknown name."""
    chosen = "reference" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ValueError(
            f"attention backend {name!r} is not available here; set --attention-backend to one of: auto, {', '.join(BACKENDS)}"
        )
    return BACKENDS[chosen](spec, pages)
