"""Streams: run a step's work in order, possibly asynchronously to the host."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from fairlead_worker.kernels.transfer import to_host

T = TypeVar("T")


class Stream(Protocol):
    """An ordered queue of work."""

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        """Queue `work` behind all earlier work. The returned function gives the result of `work`, for use in later work.

        The result may hold device tensors whose content is not computed yet.
        """
        ...

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a copy of `values` to the host behind all earlier work. The returned function waits for the copy."""
        ...


class DeviceStream:
    """The current stream of a device, where kernels queue by themselves. On a CPU all work completes immediately."""

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        done = work()
        return lambda: done

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return to_host(values)
