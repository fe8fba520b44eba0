"""The ranks of a model in torch.distributed, and the two layers that exchange data with the other ranks."""

from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from fairlead_worker.config import WorkerConfig
from fairlead_worker.errors import ModelLoadError
from fairlead_worker.sharding.rendezvous import LOADING, Store

SAME_FILES = "name a commit (@REVISION), and give all nodes the same"
"""Advice if a branch moved between two downloads, or volumes differ."""


class Group:
    """This rank among the ranks of a model."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device

    @classmethod
    def join(cls, store: Store, rank: int, size: int, local: int | None = None) -> "Group":
        """Join the other ranks through `store`. Each rank uses its own GPU (the node's GPU number `local`), or the CPU."""
        device = torch.device(f"cuda:{rank if local is None else local}" if torch.cuda.is_available() else "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=LOADING)
        return cls(rank, size, device)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, in place, with the same bits on each of them."""
        dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather [..., n] of each rank -> [..., size * n], on every rank."""
        if not tensor.numel():  # a step without sampling rows, on every rank
            return tensor.new_empty(*tensor.shape[:-1], self.size * tensor.shape[-1])
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, -1)

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
        own = torch.frombuffer(bytearray(bytes.fromhex(digest)), dtype=torch.uint8).to(self.device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        others = [rank for rank, part in enumerate(parts) if not torch.equal(part, parts[0])]
        if others:
            raise ModelLoadError(uri, f"rank {others[0]} has read other files than rank 0: {SAME_FILES}")


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
    """A layer whose outputs are summed over the ranks. A bias is added once, after the sum."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        super().__init__()
        self.layer = layer
        self.bias: torch.Tensor | None = None
        linear: Any = layer
        if hasattr(layer, "in_features"):  # torch's linear layer, or one that keeps fewer bits
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.bias, linear.bias = None if linear.bias is None else linear.bias.detach(), None
        self._group = group

    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        answer = self._group.add(self.layer(*inputs, **named))
        return answer if self.bias is None else answer + self.bias


class Gathered(nn.Module):
    """A head whose vocabulary is split over the ranks."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        super().__init__()
        self.layer = layer
        self._group = group

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._group.gather(self.layer(inputs))
