"""Detects operations that make a host wait for its device, on a CPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.resolve_conj, aten.equal, aten.allclose, aten.nonzero, aten.masked_select,
    aten._unique2,
}  # fmt: skip
"""Operations whose result, or its shape, the host reads (`resolve_conj`: `tolist` and `numpy`)."""


def waits(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether this call would wait on a GPU."""
    by_mask = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
    return func.overloadpacket in WAITS or (by_mask and any(part is not None and part.dtype == torch.bool for part in args[1]))


class NoWaiting(TorchDispatchMode):
    """Rejects such operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        assert not waits(func, args), f"{func} waits for the device"
        return func(*args, **(kwargs or {}))
