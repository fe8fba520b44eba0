"""The sum over ranks, the residual's sum and the RMS norm after it in one kernel: FlashInfer's all-reduce of TensorRT-LLM.

Each rank writes its part into the memory of all others over NVLink, waits for theirs, and goes on with the norm (one-shot). The kernel
copies into a workspace of its own, so CUDA graphs need no registered buffers. It replaces NCCL and the norm of small steps, mostly decodes:
a layer then has two kernels less. Larger steps use NCCL, whose bandwidth is better.
"""

import importlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from fairlead_worker.model.fused.norms import PrecomputedNorm, Residual, RmsNorm
from fairlead_worker.model.fused.patch import Patch, Unfused
from fairlead_worker.model.lowbit.linear import Fp8Linear
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

    def suits(self, update: torch.Tensor) -> bool:
        """Return whether the kernel takes [..., width]; all ranks come to the same result."""
        return update.numel() // self.width <= self.most_rows and not self.group.rehearses


@dataclass(frozen=True, slots=True, eq=False)
class SummedNorm:
    """A norm of a sum whose last part the ranks have not summed yet."""

    norm: RmsNorm
    sums: RankSum

    def add(self, update: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As `RmsNorm.add`, where `update` is this rank's part."""
        sums, norm, width = self.sums, self.norm, self.sums.width
        if not sums.suits(update):
            return norm.add(sums.group.add(update), residual)
        rows, kept = update.view(-1, width), residual.view(-1, width)
        sums.library.allreduce_fusion(
            rows,
            sums.workspace,
            SUM_AND_NORM,
            residual_out=kept,
            norm_out=rows,
            residual_in=kept,
            rms_gamma=norm.weight,
            rms_eps=norm.eps,
            use_oneshot=True,
            fp32_acc=True,
            weight_bias=float(norm.plus_one),
        )
        return update


@dataclass(frozen=True, slots=True, eq=False)
class SummedAhead:
    """A `PrecomputedNorm` of such a sum."""

    ahead: PrecomputedNorm
    norm: SummedNorm

    def add(self, update: torch.Tensor, residual: torch.Tensor) -> None:
        self.ahead.keep(self.norm.add(update, residual), residual)


def is_sharded(model: PreTrainedModel) -> bool:
    """Return whether ranks sum outputs of `model`."""
    return group_of(model) is not None


def group_of(model: nn.Module) -> Group | None:
    """Return the ranks of a sharded model."""
    return next((module.group for module in model.modules() if isinstance(module, Summed)), None)


def sum_patches(model: PreTrainedModel) -> list[Patch]:
    """Return patches of the layers and of the modules whose sum is moved into the norm. The layers must be `Residual` already.

    Raises Unfused. All ranks call this together.
    """
    group, layers = group_of(model), getattr(model.base_model, "layers", None)
    assert group is not None, "the model is sharded"
    if reason := unsupported(group):
        raise Unfused(reason)
    if not isinstance(layers, nn.ModuleList) or not all(isinstance(vars(layer).get("forward"), Residual) for layer in layers):
        raise Unfused("its sums before norms are not fused")
    sums = RankSum(_library(), group, model.get_input_embeddings().weight.shape[1], model.dtype)
    patches = [patch for layer in layers for patch in _layer_patches(layer, sums)]
    if not patches:
        raise Unfused("no norm in 16 bits follows a sum over ranks")
    return patches


def _layer_patches(layer: nn.Module, sums: RankSum) -> list[Patch]:
    forward = vars(layer)["forward"]
    assert isinstance(forward, Residual)
    patches = []
    attended = _summed(forward.attention, "o_proj", forward.after_attention, forward.before_mlp)
    if attended is not None:
        patches.append(Patch(attended, attended.layer.__call__))
        forward = replace(forward, before_mlp=SummedNorm(forward.before_mlp, sums))
    activated = _summed(forward.mlp, "down_proj", forward.after_mlp, forward.following.norm)
    if activated is not None:
        patches.append(Patch(activated, activated.layer.__call__))
        forward = replace(forward, following=SummedAhead(forward.following, SummedNorm(forward.following.norm, sums)))
    return [*patches, Patch(layer, forward)] if patches else []


def _summed(part: nn.Module, name: str, norm_before: nn.Module | None, norm: RmsNorm) -> Summed | None:
    """Return the last module of `part` if its sum over ranks can be moved behind `part`, to `norm`."""
    last = getattr(part, name, None)
    if not isinstance(last, Summed) or last.bias is not None or isinstance(last.layer, Fp8Linear):
        return None
    return last if norm_before is None and norm.rounder is None else None


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


def _library() -> Library:
    importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()  # compiles it, while no rank waits for this one
    return cast(Library, importlib.import_module("flashinfer.comm"))
