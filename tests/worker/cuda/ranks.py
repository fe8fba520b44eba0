"""Rank 0 of two on the modelled device. The other rank has the same numbers, so a sum doubles them.

As torch's process group for NCCL may do, a collective runs on a stream of its own, which waits for the current one and which the current
one waits for. A thread of the watchdog calls CUDA beside it.
"""

import torch
from tests.worker.cuda.tensors import CUDA, DeviceMode

from fairlead_worker.sharding.group import Group


class ModelledGroup(Group):
    """The ranks, as this one sees them."""

    def __init__(self, mode: DeviceMode) -> None:
        super().__init__(0, 2, CUDA)
        self._mode = mode
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch
        self.agreements = 0
        self.fails_at = 0
        """The agreement in which the other rank has failed; 0: none."""
        self.communicator = 0
        """Number of times that the communicators were replaced."""
        self.eager = self.most_eager = 0
        """Collectives since the last agreement that are no part of a capture: they wait for a rank that may have failed. And their most."""

    def agree(self, failure: str) -> str:
        self.agreements += 1
        self.most_eager, self.eager = max(self.eager, self.most_eager), 0
        if not failure and self.agreements == self.fails_at:
            failure = "rank 1 of 2: planted"
        return failure

    def reconnect(self) -> None:
        self.communicator += 1

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        machine, made_by = self._mode.machine, self.communicator
        self.eager += machine.current.capture is None
        machine.use_from_another_thread("an event query of the watchdog")

        def add(tensor: torch.Tensor) -> None:
            if made_by != self.communicator:
                machine.faults.append("a sum of a communicator that was replaced")
            tensor.mul_(2)

        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._mode.kernel("all_reduce", add, (tensor,), {}, [tensor])
        tensor.record_stream(self._stream)
        compute.wait_stream(self._stream)


class DoublingGroup(Group):
    """The same on a CPU."""

    def __init__(self) -> None:
        super().__init__(0, 2, torch.device("cpu"))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)
