"""The worker on a fake GPU: its loader, its fusions and its attention, with FlashInfer's stand-in."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.worker.fake_gpu.device.costs import size_of
from tests.worker.fake_gpu.device.flashinfer import make_library
from tests.worker.fake_gpu.device.gpu import CUDA, FakeGpu, MixedDevices, fake_gpu
from tests.worker.fake_gpu.device.triton import FakeProduct, FakeRounder, choose_tokens, multiply, widen
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fairlead_worker.model import loader, reading
from fairlead_worker.model.connect import connect
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.model.formats.base import replace_module
from fairlead_worker.model.formats.choose import quantize_arguments
from fairlead_worker.model.formats.experts import KeptExperts, find_experts
from fairlead_worker.model.fused.experts import activation_of
from fairlead_worker.model.loader import FUSIONS, LoadedModel
from fairlead_worker.model.lowbit import choose, int4, rows
from fairlead_worker.model.lowbit.experts import MX_GROUP, ExpertWeights, Scales
from fairlead_worker.model.lowbit.linear import Fp8BlockLinear, is_plain, keep_fp8
from fairlead_worker.model.trial_text import LENGTHS, LIKELY, Reference, TrialText
from fairlead_worker.sharding.group import Group
from fairlead_worker.sharding.shards import Shards

BLOCKS, INT4 = "float8 in blocks", "int4 in groups"
"""Quantizations that only checkpoints have. The first one is of linear layers and experts."""
INT4_GROUP = 128
EXPERTS = {BLOCKS: (Scales.BLOCKS, True), "float8 experts, widened": (Scales.BLOCKS, False), "MXFP4 experts": (Scales.GROUPS, False)}
"""Quantizations of experts -> their scales, and whether inputs are rounded. Those with the second one are of GPUs before 8.9."""


class FakeGroup(Group):
    """One rank of a sharded model, alone: a sum or a gather is one kernel, whose bytes are this rank's."""

    def __init__(self, gpu: FakeGpu, rank: int, size: int) -> None:
        super().__init__(rank, size, CUDA)
        self._gpu = gpu

    def agree(self, failure: str) -> str:
        return failure

    def reconnect(self) -> None:
        pass

    def share(self, tensor: torch.Tensor) -> None:
        self._check(tensor)
        self._gpu.kernel("broadcast", size_of(tensor))

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        self._check(tensor)
        self._gpu.kernel("all_reduce", 2 * size_of(tensor))

    def _all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._check(tensor)
        self._gpu.kernel("all_gather", (1 + self.size) * size_of(tensor))
        return [torch.empty_like(tensor) for _ in range(self.size)]

    def least(self, number: int) -> int:
        return number

    def objection(self, error: str, digest: str = "") -> str:
        return error

    @staticmethod
    def _check(tensor: torch.Tensor) -> None:
        if tensor.device.type != "cuda":
            raise MixedDevices(f"a collective of {tuple(tensor.shape)} on the host: NCCL takes tensors of the device")


class FakeSums:
    """`flashinfer.comm`: the sum over ranks with the norm after it is one kernel, which reads two rows and writes two."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def create_allreduce_fusion_workspace(self, *_: Any) -> None:
        return None

    def allreduce_fusion(self, input: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        FakeGroup._check(input)
        self._gpu.kernel("flashinfer.allreduce_norm", 4 * size_of(input))
        return input


@contextmanager
def fake_worker() -> Iterator[FakeGpu]:
    """Run the worker on a fake GPU in this context."""
    with fake_gpu() as gpu, ExitStack() as patches:
        library = make_library(gpu)
        for name in ("kernels.flashinfer", "kernels.registry", "model.loader"):
            patches.enter_context(patch(f"fairlead_worker.{name}.library", lambda: library))
        patches.enter_context(patch("fairlead_worker.sampling.trial.load_launch", lambda: partial(choose_tokens, gpu)))
        patches.enter_context(patch("fairlead_worker.sampling.trial.find_difference", lambda *_: ""))  # there are no numbers to compare
        patches.enter_context(patch("fairlead_worker.model.fused.sums.load_library", lambda: FakeSums(gpu)))
        patches.enter_context(patch("fairlead_worker.model.fused.sums.unsupported", lambda group: ""))
        for name in ("model.layers.causal", "model.layers.stack", "model.connect"):
            patches.enter_context(patch(f"fairlead_worker.{name}.is_plain", _is_plain))
        patches.enter_context(patch("fairlead_worker.model.exact.PLAIN", (FakeTensor, nn.Parameter)))
        for name in ("model.fuse", "model.fused.experts"):
            patches.enter_context(patch(f"fairlead_worker.{name}.find_refusal", lambda *_: ""))  # there are no numbers to compare
        patches.enter_context(patch("fairlead_worker.model.formats.experts.load_triton_product", lambda: FakeProduct(gpu)))
        for name in ("lowbit.choose", "formats.experts", "loader"):
            patches.enter_context(
                patch(f"fairlead_worker.model.{name}.choose_rounder", lambda device, blocks=False: FakeRounder(gpu, blocks))
            )
        patches.enter_context(
            patch("fairlead_worker.model.lowbit.int4.kernels", lambda device: int4.Kernels(partial(widen, gpu), partial(multiply, gpu)))
        )
        patches.enter_context(patch("fairlead_worker.execution.cuda_graphs.piecewise.SLACK", float("inf")))  # kernels take no time here
        # safetensors cannot read onto a fake device: weights are read to the host, then moved.
        patches.enter_context(patch.object(reading, "find_spec", lambda name: None if name == "accelerate" else find_spec(name)))
        patches.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # a copy of a module
        overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield gpu
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


def make_model(
    config: PreTrainedConfig,
    group: FakeGroup | None = None,
    limit: int = 4096,
    quantization: str = "none",
    kv_scale: float | None = None,
) -> LoadedModel:
    """Return a model of `config` in bfloat16 on the fake GPU, as the loader leaves it. It is never in the host's memory."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config)._from_config(config, dtype=torch.bfloat16)
    shards = None
    if group is not None:
        shards = Shards(group.rank, group.size)
        shards.shrink(model)
    model = model.to_empty(device=CUDA).eval().requires_grad_(False)
    if quantization in EXPERTS:
        keep_experts(model, *EXPERTS[quantization])
    if quantization == BLOCKS or quantization not in ("none", *EXPERTS):
        quantize(model, quantization)
        keep_fp8(model, torch.bfloat16, choose.choose_rounder)
        int4.keep_int4(model)
    if group is not None and shards is not None:
        connect(model, shards, group)
    layers = loader.find_layers(model, limit)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    text = TrialText.random(vocabulary)
    reference = Reference(text, *(torch.zeros(sum(LENGTHS), LIKELY, dtype=dtype, device=CUDA) for dtype in (torch.int64, torch.float32)))
    return LoadedModel(
        model=model,
        layers=layers,
        path=Path(),
        digest="",
        vocabulary_size=vocabulary,
        eos_token_ids=(),
        max_model_len=limit,
        dtype=torch.bfloat16,
        device=CUDA,
        reference=reference,
        ranks=1 if group is None else group.size,
        shards=shards,
        fused=loader.fuse_model(model, limit, FUSIONS, text),
        kv_scales=None if kv_scale is None else (kv_scale,) * len(layers),
    )


def quantize(model: PreTrainedModel, quantization: str) -> None:
    """Quantize the linear layers of `model` on the device as `--quantization` does at load."""
    from torchao.quantization import quantize_

    if quantization in STORED:
        STORED[quantization](model)
        return
    kind: Any = quantize_arguments("fake", quantization, CUDA)["quantization_config"].quant_type
    head = model.get_output_embeddings()
    with patch("torchao.quantization.quant_api._check_hardware_support"):  # asks torch.cuda.is_available
        quantize_(model, kind, filter_fn=lambda module, path: isinstance(module, nn.Linear) and module is not head)


def quantize_in_blocks(model: PreTrainedModel) -> None:
    """Replace the linear layers of `model` by those of a checkpoint in float8 blocks, as `Float8` does."""

    def make(layer: nn.Linear) -> nn.Module:
        outputs, inputs = layer.weight.shape
        weight = torch.empty(outputs, inputs, dtype=rows.FLOAT8, device=CUDA)
        scale = torch.empty(-(-outputs // rows.GROUP), -(-inputs // rows.GROUP), device=CUDA)
        return Fp8BlockLinear(weight, scale, layer.bias, torch.bfloat16, choose.choose_rounder(CUDA, True))

    _replace_linears(model, make)


def quantize_in_groups(model: PreTrainedModel) -> None:
    """Replace the linear layers of `model` by those of an AWQ or GPTQ checkpoint, as `PackedIntegers` does."""

    def make(layer: nn.Linear) -> nn.Module:
        outputs, inputs = layer.weight.shape
        codes = torch.empty(outputs, inputs, dtype=torch.uint8, device=CUDA)
        scale = torch.empty(outputs, inputs // INT4_GROUP, device=CUDA)
        return int4.int4_linear(codes, scale, torch.empty_like(scale), layer.bias)

    _replace_linears(model, make)


STORED = {BLOCKS: quantize_in_blocks, INT4: quantize_in_groups}


def _replace_linears(model: PreTrainedModel, make: Callable[[nn.Linear], nn.Module]) -> None:
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and layer is not head:
                setattr(parent, name, make(layer))


def keep_experts(model: PreTrainedModel, scales: Scales, rounds: bool) -> None:
    """Replace the experts of `model` by those of a checkpoint in few bits, as the loader does."""
    kept = KeptExperts(scales, rounds)

    def narrow(weight: torch.Tensor) -> ExpertWeights:
        experts, outputs, inputs = weight.shape
        if scales is Scales.GROUPS:
            values, scale = torch.empty(experts, outputs, inputs // 2, dtype=torch.uint8, device=CUDA), inputs // MX_GROUP
            return ExpertWeights(values, torch.empty(experts, outputs, scale, dtype=torch.uint8, device=CUDA), scales)
        blocks = (-(-outputs // rows.GROUP), -(-inputs // rows.GROUP))
        return ExpertWeights(torch.empty(weight.shape, dtype=rows.FLOAT8, device=CUDA), torch.empty(experts, *blocks, device=CUDA), scales)

    for path, module in find_experts(model):
        named: Any = module
        replace_module(model, path, kept.make(narrow(named.gate_up_proj), narrow(named.down_proj), activation_of(module)))


def _is_plain(module: nn.Module) -> bool:
    """As `is_plain`, where the weights of a GPU are fake tensors."""
    return type(getattr(module, "weight", None)) is FakeTensor or is_plain(module)
