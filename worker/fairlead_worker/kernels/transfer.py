"""Small host arrays to the device without waiting for it: `tensor.to("cuda")` from ordinary memory waits for all that is queued before."""

from collections.abc import Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[int] | Sequence[float], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`values` on `device`. To a GPU through pinned memory, which torch keeps until the copy is over, in the order of the stream."""
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    if dtype is not None:
        host = host.to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
