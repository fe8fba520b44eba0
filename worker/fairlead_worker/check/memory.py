"""Memory that a worker will reserve, before it does: weights as they will be held, and the largest step, run without content."""

import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig

from fairlead_worker.check.kept import Kept
from fairlead_worker.check.skeleton import Skeleton
from fairlead_worker.execution.forward import plain_forward
from fairlead_worker.execution.memory_profile import largest_plan, sample_costliest
from fairlead_worker.execution.pack import pack
from fairlead_worker.kernels.base import LayerSpec, PackedStep
from fairlead_worker.kernels.states import Recurrent, RecurrentStep
from fairlead_worker.model.decoder import Decoder
from fairlead_worker.model.formats.gguf import GgufWeights
from fairlead_worker.model.layers.heads import HeadLinear
from fairlead_worker.model.packed import DTYPES, HEAD_BITS
from fairlead_worker.native.ggml import packed_ggml_bytes
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import packed_bytes
from fairlead_worker.native.memory import room
from fairlead_worker.scheduler.limits import StepLimits
from fairlead_worker.weights.gguf.reader import read_gguf

SAMPLED = 4
"""Rows that are sampled to learn what a row takes."""


def host_weight_bytes(model: nn.Module, quantization: str, head: nn.Module | None) -> int:
    """Return the bytes of the weights of `model`, which has none yet, as a worker holds them on a CPU: matrices packed by the library.

    quantization: none, int8 or int4, by the library. Projections are stacked in place.
    """
    if isinstance(model, Decoder):
        model.stack()
    size, seen = 0, set[int]()
    for module in model.modules():
        own: list[torch.Tensor | None] = [*module._parameters.values(), *module._buffers.values()]
        if type(module) is nn.Linear and native() is not None and (weight := module.weight).dtype in DTYPES:
            kind = HEAD_BITS.get(quantization, quantization) if module is head else quantization
            size += room(packed_bytes(weight.shape, weight.dtype, kind))
            own = [module._parameters.get("bias")]
        elif isinstance(module, HeadLinear) and native() is not None and module.weight.dtype in DTYPES:
            size += len(module.weight) * room(packed_bytes(module.weight.shape[1:], module.weight.dtype))
            own = []
        for tensor in own:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                size += tensor.nbytes
    return size


def gguf_weight_bytes(path: Path, config: PreTrainedConfig) -> int:
    """Return the bytes of the weights of a GGUF file as a worker holds them on a CPU: matrices packed, the embedding in the file.

    Raises GgufError.
    """
    weights = GgufWeights(read_gguf(path, texts=False), config)
    sizes: dict[str, int] = {
        name: room(packed_ggml_bytes(*tensor.shape, tensor.type)) for name, tensor in weights.taken.items() if len(tensor.shape) == 2
    }
    embedding = next(name for name in sizes if name.endswith("embed_tokens.weight"))
    head = sizes[embedding] if config.tie_word_embeddings else 0
    mapped: int = weights.taken[embedding].size
    return sum(sizes.values()) - sizes[embedding] + head + mapped


def device_weight_bytes(skeleton: Skeleton, kept: Kept, made: Callable[[int, int], int] | None) -> int:
    """Return the bytes of the weights on a GPU.

    kept: layers that stay as the checkpoint has them. made: (outputs, inputs) -> bytes of a layer that is quantized while it is loaded.
    """
    model, size, counted = skeleton.model, 0, set[int]()
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        own = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
        if type(module) is nn.Linear and module is not head:
            divided = skeleton.shards.divided.get(path) if skeleton.shards is not None else None
            inputs, outputs = divided.sizes if divided is not None else (module.in_features, module.out_features)
            part = module.in_features * module.out_features / (inputs * outputs)
            if (stored := kept.linear(path, module.out_features, module.in_features)) is not None:
                size, own = size + round(stored * part), []
            elif made is not None:
                size, own = size + round(made(outputs, inputs) * part), own[1:]  # the bias stays
        elif kept.experts is not None and (stored := kept.experts_of(path)) is not None:
            size += stored // (skeleton.shards.size if skeleton.shards is not None else 1)
            own = []
        for tensor in own:
            if id(tensor) not in counted:
                counted.add(id(tensor))
                size += tensor.nbytes
    return size


class StepMemory:
    """What the largest step of a decoder takes, besides weights and KV: `run` runs it without content."""

    def __init__(self, skeleton: Skeleton, page_size: int) -> None:
        self._model, self._layers, self._page_size = skeleton.model, skeleton.layers, page_size
        self._row = _sampled_row_bytes(self._model.get_input_embeddings().weight.shape[0])

    def known(self) -> Iterable[torch.Tensor]:
        """Return the tensors that are no part of a step."""
        return chain(self._model.parameters(), self._model.buffers())

    @torch.inference_mode()
    def run(self, limits: StepLimits) -> None:
        """Make all tensors of the largest step of `limits` on the meta device, and drop them."""
        step = pack(largest_plan(limits, self._page_size), self._page_size, torch.device("meta"))
        logits = plain_forward(self._model)(step, _Attention(self._layers, step))
        torch.empty(len(logits) * self._row, dtype=torch.uint8, device="meta")


class _Attention:
    """Implements `kernels.states.RecurrentContext` without content."""

    def __init__(self, layers: tuple[LayerSpec, ...], step: PackedStep) -> None:
        self._layers, self._step = layers, step

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return query.new_empty(query.shape[0], self._layers[layer].heads, self._layers[layer].value_dim)

    def scan(self, layer: Recurrent, *inputs: torch.Tensor) -> torch.Tensor:
        return RecurrentStep(self, self._step, None).scan(layer, *inputs)


def _sampled_row_bytes(vocabulary: int) -> int:
    """Return what sampling in the costliest way takes for each row besides its logits, in bytes."""
    logits = torch.zeros(SAMPLED, vocabulary)
    with LiveBytes([logits]) as live:
        sample_costliest(logits)
    peak: int = live.peak
    return peak // SAMPLED


class PredictedMemory:
    """Memory of a GPU that is not here. Implements `sizing.DeviceMemory`."""

    def __init__(self, total: int, used: int, known: Iterable[torch.Tensor]) -> None:
        """used: bytes of weights, of libraries and of the driver's context. known: tensors that are part of it."""
        self.total = total
        self._used, self._known = used, list(known)

    def free(self) -> int:
        return max(0, self.total - self._used)

    def peak_of(self, run: Callable[[], None]) -> int:
        """Return the bytes of the tensors that `run` makes, at their peak. Raises torch.OutOfMemoryError if they are not free."""
        with LiveBytes(self._known) as live:
            run()
        peak: int = live.peak
        if peak > self.free():
            raise torch.OutOfMemoryError(f"{peak} bytes of {self.free()}")
        return peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts the bytes of tensors that are made inside of it, while they live. Tensors of the meta device count too."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        """known: tensors that do not count, nor do views of them."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size
