"""Where a step's work runs: in order, and not necessarily before the host goes on."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fairlead_worker.kernels.transfer import to_host

T = TypeVar("T")


class Stream(Protocol):
    """One stream of work."""

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        """Has `work` done behind all that came before. The answer gives what it returned, for use in later work: tensors of the device,
        whose content may not be there yet."""
        ...

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Has `values` copied to the host, behind all that came before. The answer waits for them."""
        ...


class DeviceStream:
    """A device's current stream: kernels queue up there by themselves. On a CPU everything is over at once."""

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        done = work()
        return lambda: done

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return to_host(values)
