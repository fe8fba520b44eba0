"""The other ranks of a sharded model, as the runner of rank 0 uses them. `parallel.lead` implements it."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fairlead_worker.execution.cuda_graphs.decodes import Choice
from fairlead_worker.execution.forward import HiddenStates
from fairlead_worker.kernels.base import PackedStep


class Followers(Protocol):
    """Ranks that compute what this one computes."""

    def run(
        self, step: PackedStep, graph: Choice | None, places: torch.Tensor | None = None, shares: bool = False
    ) -> AbstractContextManager[None]:
        """Send `step`, which this rank has not planned yet, so that all ranks plan it at the same time. This rank runs it in the context.

        `graph`: what the ranks replay; None: the forward pass. `places`: [n] int64 on the CPU, of hidden states. `shares`: this rank calls
        `share` before anything else.
        """
        ...

    def share(self, tokens: torch.Tensor) -> None:
        """Give the tokens of the step to the other ranks, from device to device: this host does not know them yet."""
        ...

    def join_states(self, states: HiddenStates) -> HiddenStates:
        """Return `states` with logits from every rank's part of the head."""
        ...

    def drop_graphs(self) -> None:
        """Let the other ranks free their CUDA graphs, which no step replays any more."""
        ...
