"""The sum over ranks, the residual's sum and the RMS norm after it in one kernel: FlashInfer's all-reduce of TensorRT-LLM.

Each rank writes its part into the memory of all others over NVLink, waits for theirs, and goes on with the norm (one-shot). The kernel
copies into a workspace of its own, so CUDA graphs need no registered buffers. It replaces NCCL and the norm of small steps, mostly decodes:
a layer then has two kernels less. Larger steps use NCCL, whose bandwidth is better.
"""

import importlib
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import nn

from fairlead_worker.sharding.group import Group, Summed

MOST_BYTES = {2: 4 << 20, 4: 2 << 20, 8: 1 << 20}
"""Ranks -> the most bytes that are summed so: vLLM's limits for Hopper (`fi_allreduce_fusion_max_size_mb`). For two ranks vLLM has 64 MiB;
these are the bytes of 512 rows of 4,096, because the workspace takes four times as many for each rank."""
SUM_AND_NORM = 1
"""`AllReduceFusionPattern.kARResidualRMSNorm`."""


class Library(Protocol):
    """The module `flashinfer.comm`. `test_library.py` binds our calls to the real one (0.7.2.post1)."""

    def create_allreduce_fusion_workspace(
        self, backend: str, world_size: int, rank: int, max_token_num: int, hidden_dim: int, dtype: torch.dtype
    ) -> Any:
        """Return a workspace, whose memory all ranks can write to. All ranks call this together."""
        ...

    def allreduce_fusion(
        self,
        input: torch.Tensor,
        workspace: Any,
        pattern: int,
        *,
        residual_out: torch.Tensor,
        norm_out: torch.Tensor,
        residual_in: torch.Tensor,
        rms_gamma: torch.Tensor,
        rms_eps: float,
        use_oneshot: bool,
        fp32_acc: bool,
        weight_bias: float,
    ) -> torch.Tensor:
        """Set residual_out = residual_in + the sum of input over the ranks, and norm_out to its norm, all [T, width].

        Outputs may be inputs, as in vLLM.
        """
        ...


@dataclass(eq=False)
class RankSum:
    """The kernel and its workspace."""

    library: Library
    group: Group
    width: int
    dtype: torch.dtype

    @cached_property
    def most_rows(self) -> int:
        return MOST_BYTES[self.group.size] // (self.width * self.dtype.itemsize)

    @cached_property
    def workspace(self) -> Any:
        size, rank = self.group.size, self.group.rank
        return self.library.create_allreduce_fusion_workspace("trtllm", size, rank, self.most_rows, self.width, self.dtype)

    def add_norm(self, update: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        """Return the norm of residual + the sum of `update` over the ranks, both [T, width]. `residual` becomes that sum."""
        self.library.allreduce_fusion(
            update,
            self.workspace,
            SUM_AND_NORM,
            residual_out=residual,
            norm_out=update,
            residual_in=residual,
            rms_gamma=weight,
            rms_eps=eps,
            use_oneshot=True,
            fp32_acc=True,
            weight_bias=float(plus_one),
        )
        return update

    def suits(self, update: torch.Tensor) -> bool:
        """Return whether the kernel takes [T, width]; all ranks come to the same result."""
        return update.numel() // self.width <= self.most_rows and not self.group.rehearses


def group_of(model: nn.Module) -> Group | None:
    """Return the ranks of a sharded model."""
    return next((module.group for module in model.modules() if isinstance(module, Summed)), None)


def unsupported(group: Group) -> str:
    """Return why the kernel does not run on the GPUs of `group`; empty if it does."""
    if group.size not in MOST_BYTES:
        return f"the kernel is for {', '.join(map(str, MOST_BYTES))} ranks, and there are {group.size}"
    if not group.is_on_one_node:
        return "the ranks are on several nodes"
    if torch.cuda.get_device_capability(group.device) < (9, 0):
        return "the GPU is older than Hopper"
    devices = range(group.size)
    if not all(torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other):
        return "the GPUs cannot access each other's memory"
    return "" if _have_nvlink(group.size) else "not all GPUs are connected by NVLink"


def _have_nvlink(count: int) -> bool:
    """Return whether the first `count` GPUs of this process are all connected by NVLink, as NVIDIA's library reports it."""
    nvml: Any = importlib.import_module("pynvml")  # a dependency of FlashInfer
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(place).uuid}") for place in range(count)]
        states = [
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            for one in handles
            for other in handles
            if one is not other
        ]
        return all(state == nvml.NVML_P2P_STATUS_OK for state in states)
    finally:
        with suppress(Exception):
            nvml.nvmlShutdown()


def load_library() -> Library:
    importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()  # compiles it, while no rank waits for this one
    return cast(Library, importlib.import_module("flashinfer.comm"))
