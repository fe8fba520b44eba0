"""Rank 0's side of shared work: passes, copies and adapter changes are sent to the other ranks before rank 0 starts them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from fairlead_worker.execution.cuda_graphs.decodes import Choice
from fairlead_worker.execution.forward import HiddenStates
from fairlead_worker.execution.host import Copies, HostStore
from fairlead_worker.execution.runner import ModelRunner
from fairlead_worker.ipc.messages import AdapterChanged, FetchAdapter, LoadAdapter, UnloadAdapter
from fairlead_worker.kernels.base import GroupPages, PackedStep
from fairlead_worker.kernels.transfer import to_device
from fairlead_worker.lora.adapters import AdapterSet
from fairlead_worker.parallel.messages import AddAdapter, CopyPages, DropGraphs, ReadLogits, RemoveAdapter, Run
from fairlead_worker.parallel.ranks import Ranks
from fairlead_worker.sharding.group import Group


def lead(runner: ModelRunner, ranks: Ranks, group: Group) -> None:
    """Make the other ranks compute what `runner` computes from now on. They must have made their runner in the same way."""
    runner.followers = RankFollowers(ranks, group)
    if runner.host is not None:
        runner.host = LedHost(runner.host, ranks)


class RankFollowers:
    """Implements `execution.followers.Followers`."""

    def __init__(self, ranks: Ranks, group: Group) -> None:
        self._ranks, self._group = ranks, group

    @contextmanager
    def run(self, step: PackedStep, graph: Choice | None, places: torch.Tensor | None = None, shares: bool = False) -> Iterator[None]:
        self._ranks.send(to_message(step, graph, places, shares))
        with self._ranks.collective():
            yield

    def share(self, tokens: torch.Tensor) -> None:
        self._group.share(tokens)

    def join_states(self, states: HiddenStates) -> HiddenStates:
        return LedHiddenStates(states, self._ranks)

    def drop_graphs(self) -> None:
        self._ranks.send(DropGraphs())


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
            self._ranks.send(CopyPages(list(saves), list(loads)))
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
            case FetchAdapter():
                self._ranks.fetch(message)
                return None
            case LoadAdapter(number=number, name=name, uri=uri, path=path):
                self._ranks.fetched(number, Path(path))
                self._ranks.send(AddAdapter(number, name, uri))
            case UnloadAdapter(number=number):
                self._ranks.send(RemoveAdapter(number))
        with self._ranks.collective():
            return self._inner.change(message)


def to_message(step: PackedStep, graph: Choice | None = None, places: torch.Tensor | None = None, shares: bool = False) -> Run:
    """Encode a step. Waits for the device only if the step has no arrays on the host."""
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
        others=[(_bytes(each.slots if each.host_slots is None else each.host_slots), _bytes(each.page_indices)) for each in step.others],
        places=None if places is None else _bytes(places),
        adapters=list(step.adapters),
        graph=None if graph is None else (graph.rows, graph.joins),
        states=list(step.states),
        shares=shares,
    )


def to_step(message: Run, device: torch.device) -> tuple[PackedStep, Choice | None, torch.Tensor | None]:
    """Decode the step onto `device`, the graph that replays it, and `places` [n] int64."""
    step = PackedStep(
        tokens=to_device(_tensor(message.tokens), device),
        positions=to_device(_tensor(message.positions), device),
        slots=to_device(_tensor(message.slots), device),
        starts=message.starts,
        counts=message.counts,
        page_indptr=_tensor(message.page_indptr, np.int32),
        page_indices=_tensor(message.page_indices, np.int32),
        sampling=to_device(_tensor(message.sampling), device),
        adapters=message.adapters,
        others=[GroupPages(to_device(_tensor(slots), device), _tensor(pages, np.int32)) for slots, pages in message.others],
        states=message.states,
    )
    graph = None if message.graph is None else Choice(*message.graph)
    return step, graph, None if message.places is None else to_device(_tensor(message.places), device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor(data: bytes, kind: type[np.generic] = np.int64) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), kind))
