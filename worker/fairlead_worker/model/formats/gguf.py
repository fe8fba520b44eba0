"""Weights of GGUF files: on a CPU kept in the file's own blocks, which native kernels multiply; elsewhere widened to the model's dtype."""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fairlead_worker.model.formats.base import Format, Parts, Pending, Target, replace_module
from fairlead_worker.model.layers.stack import Projections, Slice, Stack
from fairlead_worker.native.ggml import GgmlLinear, dequantize_rows, packed_ggml_bytes
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import KINDS
from fairlead_worker.native.memory import Arena, room
from fairlead_worker.weights.gguf.architectures import architecture_of, is_described, module_of
from fairlead_worker.weights.gguf.folder import whole_models
from fairlead_worker.weights.gguf.reader import Gguf, GgufError, Tensor

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Taken = dict[str, Tensor]
"""Name of a parameter in transformers -> tensor of the file."""


class GgufWeights:
    """The tensors of a model, by the names of transformers."""

    def __init__(self, gguf: Gguf, config: PreTrainedConfig) -> None:
        """Raises GgufError for a tensor that the architecture does not have."""
        name, self.architecture = architecture_of(gguf)
        self.gguf = gguf
        self.taken: Taken = {}
        self._maps = {path: _map(path) for path in {tensor.path for tensor in gguf.tensors.values()}}
        for tensor in gguf.tensors.values():
            if is_described(tensor.name):
                continue
            if (module := module_of(self.architecture, tensor.name)) is None:
                raise GgufError(gguf.path, f"tensor {tensor.name} is not supported in {name}: serve the model's safetensors")
            self.taken[".".join(module)] = tensor
        # Not from the metadata, where they may be arrays of one number for each layer.
        self._heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def rows(self, name: str) -> torch.Tensor:
        """Return the bytes of each row, [rows, bytes] uint8: of the mapped file, unless they have another order there."""
        tensor = self.taken[name]
        rows = self._maps[tensor.path][1][tensor.offset : tensor.offset + tensor.size].view(tensor.shape[0], -1)
        heads = self._heads.get(name.split(".")[-2])
        if not self.architecture.interleaved or heads is None:
            return rows
        # Meta's rope turns neighbours, and transformers' turns halves of a head.
        return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)

    def widen(self, name: str) -> torch.Tensor:
        """Return a parameter in float32."""
        tensor = self.taken[name]
        rows = self.rows(name)
        plain = PLAIN.get(tensor.type)
        values = _dequantize(rows, tensor.type) if plain is None else rows.view(plain).view(tensor.shape).float()
        return values - 1 if self.architecture.norms_with_one and name.endswith("norm.weight") else values

    def release(self, name: str) -> None:
        """Let the kernel drop the pages of a tensor that has been packed: they would count as the process's memory."""
        tensor, page = self.taken[name], mmap.PAGESIZE
        begin, end = -(-tensor.offset // page) * page, (tensor.offset + tensor.size) // page * page
        if begin < end:
            self._maps[tensor.path][0].madvise(mmap.MADV_DONTNEED, begin, end - begin)


class GgmlEmbedding(nn.Module):
    """Embedding of rows that stay in the mapped file: a step widens those of its tokens."""

    def __init__(self, blocks: torch.Tensor, ggml_type: str, width: int, dtype: torch.dtype) -> None:
        """blocks: [tokens, bytes of a row] uint8."""
        super().__init__()
        self.blocks, self.ggml_type, self.width = blocks, ggml_type, width
        # A buffer, so that `exact.widened` makes the results float32.
        self.like = nn.Buffer(torch.empty(0, dtype=dtype), persistent=False)
        # Its size is asked for like that of other embeddings.
        self.weight = torch.empty(len(blocks), width, dtype=dtype, device="meta")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = dequantize_rows(self.blocks[ids.flatten()], self.ggml_type, self.width)
        return rows.to(self.like.dtype).view(*ids.shape, self.width)


class _Projection:
    """A linear layer of the file as a part of a `Stack`."""

    def __init__(self, file: GgufWeights, name: str, bias: torch.Tensor | None, dtype: torch.dtype, arena: Arena) -> None:
        self.rows, self.kind, self.bias, self.dtype, self._arena = file.rows(name), file.taken[name].type, bias, dtype, arena
        self.out_features, self.in_features = file.taken[name].shape

    def stacked(self, others: "list[_Projection]") -> GgmlLinear:
        """Return one layer of this one and others."""
        parts = [(part.rows, part.kind) for part in (self, *others)]
        biases = [part.bias for part in (self, *others) if part.bias is not None]
        return GgmlLinear(parts, self.in_features, torch.cat(biases) if biases else None, dtype=self.dtype, arena=self._arena)


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF model that `folder` describes; None for other models."""
    return next(iter(whole_models(folder)), None)


class GgufBlocks(Format):
    """The tensors of a GGUF file. If they are kept, matrices are as they are in the file, and only norms are widened."""

    method = "gguf"

    def __init__(self, file: GgufWeights, config: PreTrainedConfig) -> None:
        super().__init__({name: {} for name in file.taken})
        self.file, self._tied = file, config.tie_word_embeddings

    @property
    def size(self) -> int:
        """Return the bytes of the weights."""
        return sum(tensor.size for tensor in self.file.taken.values())

    def reason_to_widen(self, target: Target) -> str:
        fits = target.capability is None and native() is not None and target.dtype in KINDS
        return "" if fits else "blocks are for the native library of CPUs"

    def widen(self, weight: str, parts: Parts, dtype: torch.dtype) -> torch.Tensor:
        return self.file.widen(weight).to(dtype)

    def prepare(self, model: PreTrainedModel) -> None:
        """Raises GgufError unless the file has each parameter of the model, in its shape."""
        self._check_shapes(model)
        if self.keeps:
            model.all_tied_weights_keys = {}  # there are no parameters to tie
            for path, module in list(model.named_modules()):
                if isinstance(module, nn.Linear | nn.Embedding):
                    replace_module(model, path, Pending(module, path == "lm_head"))

    @torch.no_grad()
    def place(self, model: PreTrainedModel, tensors: Mapping[str, Any], dtype: torch.dtype, pending: Iterable[str]) -> None:
        """Replace each `Pending` by a layer of the file's blocks: q, k and v as one, and gate and up as one."""
        paths = [*pending]
        if not paths:
            return
        taken = self.file.taken
        embedding = next(path for path in paths if path.endswith("embed_tokens"))
        source = {path: f"{embedding if path == 'lm_head' and self._tied else path}.weight" for path in paths}
        arena = Arena(sum(room(_packed_bytes(taken[name])) for path, name in source.items() if path != embedding))
        tensor = taken[source[embedding]]
        replace_module(model, embedding, GgmlEmbedding(self.file.rows(source[embedding]), tensor.type, tensor.shape[1], dtype))
        for stack, names in _groups(model, [path for path in paths if path != embedding]):
            parts = [_Projection(self.file, source[path], model.get_submodule(path).bias, dtype, arena) for path in names]
            if names == [stack]:
                replace_module(model, stack, parts[0].stacked([]))
            else:
                for path, part in zip(names, parts, strict=True):
                    replace_module(model, path, Slice(part))
                replace_module(model, stack, Stack(parts))
            for path in names:
                self.file.release(source[path])

    def _check_shapes(self, model: PreTrainedModel) -> None:
        file, taken = self.file.gguf.path, self.file.taken
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if self._tied:
            parameters.pop("lm_head.weight", None)
        for name, parameter in parameters.items():
            if (tensor := taken.get(name)) is None:
                raise GgufError(file, f"it has no tensor for {name}: the file is incomplete, convert the model again")
            if tensor.shape != tuple(parameter.shape):
                sizes = f"{list(tensor.shape)}, and its metadata makes {list(parameter.shape)}"
                raise GgufError(file, f"tensor {tensor.name} is {sizes}: convert the model again")
        if further := sorted(taken.keys() - parameters.keys()):
            raise GgufError(file, f"tensor {taken[further[0]].name} has no place in the model: convert the model again")


def _groups(model: nn.Module, paths: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of a stack and those of its parts; for a layer that is in no stack, its own path twice."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        if not isinstance(holder, Projections) or name not in holder.PARTS:
            yield path, [path]
        elif name == holder.PARTS[0]:
            yield f"{parent}.{holder.STACK}", [f"{parent}.{child}" for child in holder.PARTS]


def _packed_bytes(tensor: Tensor) -> int:
    outputs, inputs = tensor.shape
    return packed_ggml_bytes(outputs, inputs, tensor.type)


def _dequantize(rows: torch.Tensor, kind: str) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(numpy.ascontiguousarray(dequantize(rows.numpy(), GGMLQuantizationType[kind])))


def _map(path: Path) -> tuple[mmap.mmap, torch.Tensor]:
    """Return the mapped file, also as bytes. The mapping is private: torch knows no tensors that are read only."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return mapped, torch.frombuffer(mapped, dtype=torch.uint8)
