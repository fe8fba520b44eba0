"""Rank 0's side of shared work: passes, copies and adapter changes are sent to the other ranks before rank 0 starts them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fairlead_worker.execution.forward import Forward, HiddenStates
from fairlead_worker.execution.host import Copies, HostStore
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import AdapterChanged, FetchAdapter, LoadAdapter, UnloadAdapter
from fairlead_worker.kernels.base import PackedStep, StepContext
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.parallel.messages import AddAdapter, CopyPages, FetchFiles, ReadLogits, RemoveAdapter, Run
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.weights.cache import ModelCache
from fairlead_worker.weights.progress import Progress
from fairlead_worker.weights.uri import resolve


def lead(runner: ModelRunner, ranks: Ranks) -> None:
    """Make the other ranks compute what `runner` computes from now on. They must have made their runner in the same way."""
    runner.forward = LedForward(runner.forward, ranks)
    if runner.host is not None:
        runner.host = LedHost(runner.host, ranks)


class Located:
    """Implements `model.loader.Locate` on rank 0: downloads the files once, and sends their folder to the other ranks of this node."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __call__(self, uri: str, progress: Progress, cache: ModelCache | None) -> Path:
        """Return the folder of the files. Raises ModelLoadError."""
        folder = resolve(uri, progress, cache)
        self._ranks.load(folder)
        return folder


class LedForward:
    """Implements `execution.forward.Forward`."""

    def __init__(self, inner: Forward, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.can_score = inner.can_score

    def __call__(self, step: PackedStep, context: StepContext) -> torch.Tensor:
        """Return logits [S, vocabulary] of `step.sampling`."""
        self._ranks.send(to_message(step))
        with self._ranks.collective():
            return self._inner(step, context)

    def score(self, step: PackedStep, context: StepContext, places: torch.Tensor) -> tuple[torch.Tensor, HiddenStates]:
        """Return the same logits, and the model's results at `places`."""
        self._ranks.send(to_message(step, places))
        with self._ranks.collective():
            logits, seen = self._inner.score(step, context, places)
        return logits, LedHiddenStates(seen, self._ranks)


class LedHiddenStates:
    """Implements `execution.forward.HiddenStates`."""

    def __init__(self, inner: HiddenStates, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def logits(self, some: slice) -> torch.Tensor:
        """Return logits [n, vocabulary], from every rank's part of the head."""
        self._ranks.send(ReadLogits(some.start, some.stop))
        with self._ranks.collective():
            return self._inner.logits(some)

    def states(self, some: slice) -> torch.Tensor:
        """Return hidden states [n, hidden], equal on every rank."""
        return self._inner.states(some)


class LedHost:
    """Implements `execution.host.HostStore`: each rank keeps the KV of its own heads."""

    def __init__(self, inner: HostStore, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks
        self.slots = inner.slots

    def copy(self, saves: Copies, loads: Copies) -> None:
        """Copy on every rank."""
        if saves or loads:
            self._ranks.send(CopyPages(_pairs(saves), _pairs(loads)))
        self._inner.copy(saves, loads)


class LedAdapters:
    """Implements `engine.loop.Adapters`: each rank has its part of each adapter, and changes it between the same steps."""

    def __init__(self, inner: AdapterSet, ranks: Ranks) -> None:
        self._inner, self._ranks = inner, ranks

    def __contains__(self, number: int) -> bool:
        return number in self._inner

    def change(self, message: FetchAdapter | LoadAdapter | UnloadAdapter) -> AdapterChanged | None:
        """Apply a change. None: other nodes are downloading the files, and the answer follows when they are done."""
        match message:
            case FetchAdapter(number=number, name=name, uri=uri):
                self._ranks.fetch(FetchFiles(number, name, uri))
                return None
            case LoadAdapter(number=number, name=name, uri=uri, path=path):
                self._ranks.fetched(number, Path(path))
                self._ranks.send(AddAdapter(number, name, uri))
            case UnloadAdapter(number=number):
                self._ranks.send(RemoveAdapter(number))
        with self._ranks.collective():
            return self._inner.change(message)


def to_message(step: PackedStep, places: torch.Tensor | None = None) -> Run:
    """Encode a step. Waits for the device only if the step has no arrays on the host, or for `places`."""
    arrays = step.host or step
    return Run(
        tokens=_bytes(arrays.tokens),
        positions=_bytes(arrays.positions),
        slots=_bytes(arrays.slots),
        starts=list(step.starts),
        counts=list(step.counts),
        page_indptr=_bytes(step.page_indptr),
        page_indices=_bytes(step.page_indices),
        sampling=_bytes(arrays.sampling),
        places=None if places is None else _bytes(places),
        adapters=list(step.adapters),
    )


def to_step(message: Run, device: torch.device) -> tuple[PackedStep, torch.Tensor | None]:
    """Decode the step onto `device`, and `places` [n] int64."""
    step = PackedStep(
        tokens=_tensor(message.tokens).to(device),
        positions=_tensor(message.positions).to(device),
        slots=_tensor(message.slots).to(device),
        starts=message.starts,
        counts=message.counts,
        page_indptr=_tensor(message.page_indptr, np.int32),
        page_indices=_tensor(message.page_indices, np.int32),
        sampling=_tensor(message.sampling).to(device),
        adapters=message.adapters,
    )
    return step, None if message.places is None else _tensor(message.places).to(device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor(data: bytes, kind: type[np.generic] = np.int64) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), kind))


def _pairs(copies: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(page, slot) for page, slot in copies]
