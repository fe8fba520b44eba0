"""Asynchronous copies of small arrays to the device and back. Copies of pageable memory would wait for all work queued before."""

from collections.abc import Callable, Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy `values` to `device`. A GPU gets them through pinned memory, which torch keeps until the copy completes, in stream order.

    A view with gaps becomes contiguous first: torch would copy it through pageable memory.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    if dtype is not None:
        host = host.to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.contiguous().pin_memory().to(device, non_blocking=True)


def watch(device: torch.device) -> Callable[[], bool]:
    """Return a function that says whether `device` has done all work that its current stream has now. A CPU always has."""
    if device.type != "cuda":
        return lambda: True
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    done.record()
    return done.query


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Queue a copy of `values` to the host, in stream order. The returned function waits for that copy only."""
    if values.device.type != "cuda":
        return lambda: values
    # Pinned memory comes from torch's cache, which reuses it after an event marks the copy complete.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    copied.record()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait
