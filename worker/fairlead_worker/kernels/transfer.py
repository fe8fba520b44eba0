"""Small arrays to the device and back without waiting for it: copies from and to ordinary memory wait for all that is queued before."""

from collections.abc import Callable, Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`values` on `device`. To a GPU through pinned memory, which torch keeps until the copy is over, in the order of the stream.

    In one piece: of views with gaps torch makes a copy first, and that one is in ordinary memory.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    if dtype is not None:
        host = host.to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.contiguous().pin_memory().to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Has `values` copied to the host, in the order of the stream. The answer waits for them, and for nothing that is queued behind."""
    if values.device.type != "cuda":
        return lambda: values
    # Pinned memory comes from torch's cache, which gives it out again when an event says that the copy is over.
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch
    copied.record()

    def wait() -> torch.Tensor:
        copied.synchronize()
        return host

    return wait
