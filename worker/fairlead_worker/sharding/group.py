"""The ranks of a model in torch.distributed, and the two layers that exchange data with the other ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.sharding.rendezvous import LOADING, FileStore, Store, within

SAME_FILES = "name a commit (@REVISION), and give all nodes the same"
"""Advice if a branch moved between two downloads, or volumes differ."""
AGREEMENT = timedelta(minutes=10)
"""How long `agree` waits for another rank. Meanwhile rank 0 may record the graphs of a draft model, which the others do not have."""
LOCAL_CAPTURE = {"NCCL_RUNTIME_CONNECT": "0", "NCCL_GRAPH_REGISTER": "0"}
"""NCCL connects all its algorithms at the start, and registers no buffers of graphs. Otherwise it waits for the other ranks on the host
while a collective is captured, for ever if one of them has failed. The environment takes precedence."""


class Group:
    """This rank among the ranks of a model."""

    def __init__(self, rank: int, size: int, device: torch.device, store: Store | None = None) -> None:
        """`store`: needed for `agree`."""
        self.rank, self.size, self.device = rank, size, device
        self.is_on_one_node = True
        """Whether all ranks share a node: those meet through a file."""
        self._store = store
        self._agreements = 0
        self._rehearses = False

    @classmethod
    def join(cls, store: Store, rank: int, size: int, local: int | None = None) -> "Group":
        """Join the other ranks through `store`. Each rank uses its own GPU (the node's GPU number `local`), or the CPU."""
        device = torch.device(f"cuda:{rank if local is None else local}" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
            for name, value in LOCAL_CAPTURE.items():
                os.environ.setdefault(name, value)
        joined = cls(rank, size, device, store)
        joined.is_on_one_node = isinstance(store, FileStore)
        joined._connect(store)
        return joined

    def _connect(self, store: Store) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=LOADING)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in place, with the same bits on each of them."""
        if not self._rehearses:
            self._all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather [..., n] of each rank -> [..., size * n], on every rank."""
        if not tensor.numel():  # a step without sampling rows, on every rank
            return tensor.new_empty(*tensor.shape[:-1], self.size * tensor.shape[-1])
        parts = [tensor] * self.size if self._rehearses else self._all_gather(tensor.contiguous())
        return torch.cat(parts, -1)

    def share(self, tensor: torch.Tensor) -> None:
        """Give all ranks the numbers of rank 0, in place."""
        dist.broadcast(tensor, 0)

    @property
    def rehearses(self) -> bool:
        """Return whether `rehearse` is under way, so that other collectives must be left out too."""
        return self._rehearses

    @contextmanager
    def rehearse(self) -> Iterator[None]:
        """Leave out sums and gathers in this context: the results are wrong, but no rank waits for one that has failed."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def agree(self, failure: str) -> str:
        """Return why a rank has failed, the same text on each; empty if none has. All ranks must call this at the same point.

        It does not use the device, which may be broken. Raises TimeoutError if a rank does not call it within AGREEMENT.
        """
        assert self._store is not None, "a group that has joined"
        self._agreements += 1
        keys = [f"agreement {self._agreements}, rank {rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], f"={failure}")  # stores have no empty values
        try:
            self._store.wait(keys, AGREEMENT)
        except Exception as error:
            silent = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise TimeoutError(
                f"rank {', '.join(silent)} of {self.size} has not said within {AGREEMENT.total_seconds():.0f} s whether it could go on"
            ) from error
        failures = [self._store.get(key).decode()[1:] for key in keys]
        if not any(failures):
            return ""
        rank, reason = next((rank, each) for rank, each in enumerate(failures) if each)
        return reason if len(set(failures)) == 1 else f"rank {rank} of {self.size}: {reason}"

    def reconnect(self) -> None:
        """Replace the communicators, on all ranks together. NCCL fails at its next collective if a capture has failed around an earlier one
        (pie-project/pie#499).
        """
        assert self._store is not None
        if self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()  # does not wait for the other ranks, as the usual end does
        else:
            dist.destroy_process_group()
        self._connect(within(self._store, f"after agreement {self._agreements}"))
        self.least(0)  # NCCL connects at the first collective, which must not be part of a capture

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor)
        return parts

    def least(self, number: int) -> int:
        """Return the smallest number of all ranks."""
        smallest = torch.tensor(number, device=self.device)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def objection(self, error: str, digest: str = "") -> str:
        """Return why the ranks cannot continue, the same text on each; empty if all can and have read the same `digest`.

        All ranks must call this at the same point, including ranks that failed before: `error` says why.
        """
        encoded = self._gather_bytes(msgspec.msgpack.encode((error, digest)))
        errors, digests = zip(*(msgspec.msgpack.decode(data, type=tuple[str, str]) for data in encoded), strict=True)
        if failed := [rank for rank, reason in enumerate(errors) if reason]:
            reason = errors[failed[0]]
            return str(reason) if len(set(errors)) == 1 else f"rank {failed[0]} of {self.size}: {reason}"
        if others := [rank for rank, each in enumerate(digests) if each != digests[0]]:
            return f"rank {others[0]} of {self.size} has read other files than rank 0: {SAME_FILES}"
        return ""

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of each rank, on every rank."""
        sizes = self.gather(torch.tensor([len(data)], device=self.device)).tolist()
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self.gather(own.to(self.device)).cpu().view(self.size, -1).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]

    def check_same(self, uri: str, digest: str) -> None:
        """Raise ModelLoadError on every rank if two have read different files, because a branch moved or volumes differ."""
        if difference := self.objection("", digest):
            raise ModelLoadError(uri, difference)


def check_devices(config: WorkerConfig) -> None:
    """Raise ModelLoadError if there are fewer GPUs than ranks. Without GPUs, ranks share the cores."""
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = config.local_ranks
    if 0 < seen < needed:
        over = f" over --nnodes {config.nnodes}" if config.nnodes > 1 else ""
        raise ModelLoadError(
            config.model,
            f"--tensor-parallel-size {config.tensor_parallel_size}{over} needs {needed} GPUs, and {seen} are seen here: "
            f"set spec.resources.gpus to {needed}, or spec.engine.tensorParallel to {seen * config.nnodes}",
        )


class Summed(nn.Module):
    """A layer whose outputs are summed over the ranks. A bias is added once."""

    deferred = False
    """Whether the outputs are left as this rank's part: the norm that reads them sums."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        super().__init__()
        self.layer = layer
        self.bias: torch.Tensor | None = None
        linear: Any = layer
        if hasattr(layer, "in_features"):  # torch's linear layer, or one that keeps fewer bits
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.bias, linear.bias = None if linear.bias is None else linear.bias.detach(), None
        elif group.rank and getattr(layer, "down_proj_bias", None) is not None:  # of experts (gpt-oss): the first rank adds it
            linear.down_proj_bias.zero_()
        self.group = group

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.layer(*inputs, **named)
        if self.deferred:
            return answer
        answer = self.group.add(answer)
        return answer if self.bias is None else answer + self.bias


class Gathered(nn.Module):
    """A head whose vocabulary is split over the ranks."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        super().__init__()
        self.layer = layer
        self._group = group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.layer(inputs))
