"""Where a step's work runs: in order, and not necessarily before the host goes on."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")


class Lane(Protocol):
    """One stream of work."""

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        """Has `work` done behind all that came before. The answer gives what it returned, for use in later work: tensors of the device,
        whose content may not be there yet."""
        ...

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Has `values` copied to the host, behind all that came before. The answer waits for them."""
        ...


class DeviceLane:
    """A device's current stream: kernels queue up there by themselves. On a CPU everything is over at once."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        done = work()
        return lambda: done

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self._cuda:
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
