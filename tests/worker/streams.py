"""Streams of a device, on a CPU."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class Thread:
    """A stream on a thread: the forward pass runs while the host goes on."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        return self._thread.submit(work).result

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self._thread.submit(values.clone).result


class Late:
    """A stream that runs nothing until a result is needed, and then all work up to that result, in order."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []

    def run(self, work: Callable[[], T]) -> Callable[[], T]:
        done: list[T] = []
        self._queue.append(lambda: done.append(work()))

        def see() -> T:
            while not done:
                self._queue.pop(0)()
            return done[0]

        return see

    def fetch(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: values
