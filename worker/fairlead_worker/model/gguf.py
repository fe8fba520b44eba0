"""Weights of GGUF files: on a CPU kept in the file's own blocks, which native kernels multiply; elsewhere widened to the model's dtype."""

import mmap
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fairlead_worker.errors import ModelLoadError
from fairlead_worker.model.families.registry import model_class
from fairlead_worker.model.layers.stack import Projections, Slice, Stack
from fairlead_worker.native.ggml import GgmlLinear, dequantize_rows, packed_ggml_bytes
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import KINDS
from fairlead_worker.native.memory import Arena, room
from fairlead_worker.weights.gguf.architectures import architecture_of, is_described, module_of
from fairlead_worker.weights.gguf.folder import whole_models
from fairlead_worker.weights.gguf.reader import Gguf, GgufError, Tensor, read_gguf
from fairlead_worker.weights.progress import Progress

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

    def __init__(self, rows: torch.Tensor, kind: str, inputs: int, bias: torch.Tensor | None, dtype: torch.dtype, arena: Arena) -> None:
        self.rows, self.kind, self.bias, self.dtype, self._arena = rows, kind, bias, dtype, arena
        self.in_features, self.out_features = inputs, len(rows)

    def stacked(self, others: "list[_Projection]") -> GgmlLinear:
        """Return one layer of this one and others."""
        parts = [(part.rows, part.kind) for part in (self, *others)]
        biases = [part.bias for part in (self, *others) if part.bias is not None]
        return GgmlLinear(parts, self.in_features, torch.cat(biases) if biases else None, dtype=self.dtype, arena=self._arena)


class _Missing(nn.Module):
    """The place of a matrix that is put in after the load."""


def find_gguf(folder: Path) -> Path | None:
    """Return the GGUF model that `folder` describes; None for other models."""
    return next(iter(whole_models(folder)), None)


def read_gguf_model(
    uri: str, path: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, progress: Progress
) -> tuple[PreTrainedModel, bool]:
    """Return the model, and whether its linear layers are in the file's blocks. Raises ModelLoadError."""
    try:
        weights = GgufWeights(read_gguf(path, texts=False), config)
        size = sum(tensor.size for tensor in weights.taken.values())
        progress("weights", 0, 0, size)
        keep = device.type == "cpu" and native() is not None and dtype in KINDS
        model = (_read_kept if keep else _read_widened)(weights, config, dtype, device)
    except GgufError as error:
        raise ModelLoadError(uri, str(error)) from error
    except Exception as error:  # whatever a family's own code raises
        raise ModelLoadError(uri, f"weights of {path.name} cannot be loaded: {type(error).__name__}: {error}") from error
    progress("weights", 100, size, size)
    return model.eval().requires_grad_(False), keep


def _read_widened(weights: GgufWeights, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return transformers' model. Tensor after tensor is widened and put onto the device."""
    state = {name: _Widened(weights, name) for name in weights.taken}
    return _from_state(weights, config, dtype, state, keep=False, device=device)


def _read_kept(weights: GgufWeights, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model with its matrices as they are in the file. Only norms are widened."""
    state = {name: _Widened(weights, name) for name, tensor in weights.taken.items() if len(tensor.shape) == 1 and "norm" in name}
    model = _from_state(weights, config, dtype, state, keep=True, device=device)
    _put_matrices(model, weights, dtype, config.tie_word_embeddings)
    return model


def _from_state(
    weights: GgufWeights, config: PreTrainedConfig, dtype: torch.dtype, state: Mapping[str, "_Widened"], *, keep: bool, device: torch.device
) -> PreTrainedModel:
    """Let transformers make the model of `config` and fill it with `state`. keep: matrices get a `_Missing` instead."""
    family = model_class(config)

    def __init__(self: PreTrainedModel, config: PreTrainedConfig) -> None:
        family.__init__(self, config)
        _check_shapes(self, weights, config.tie_word_embeddings)
        if keep:
            self.all_tied_weights_keys = {}  # there are no parameters to tie
            for path, module in list(self.named_modules()):
                if isinstance(module, nn.Linear | nn.Embedding):
                    _replace(self, path, _Missing())

    made: type[PreTrainedModel] = type(family.__name__, (family,), {"__init__": __init__, "__module__": family.__module__})
    given: dict[str, Any] = {"config": config, "dtype": dtype, "state_dict": dict(state)}
    if device.type != "cpu" and find_spec("accelerate"):  # without accelerate, transformers reads to the host first
        given["device_map"] = {"": device}
    model: PreTrainedModel = made.from_pretrained(None, **given)
    return model.to(device)


def _check_shapes(model: PreTrainedModel, weights: GgufWeights, tied: bool) -> None:
    """Raise GgufError unless the file has each parameter of the model (made on meta), in its shape."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if tied:
        parameters.pop("lm_head.weight", None)
    for name, parameter in parameters.items():
        if (tensor := weights.taken.get(name)) is None:
            raise GgufError(weights.gguf.path, f"it has no tensor for {name}: the file is incomplete, convert the model again")
        if tensor.shape != tuple(parameter.shape):
            raise GgufError(
                weights.gguf.path,
                f"tensor {tensor.name} is {list(tensor.shape)}, and its metadata makes {list(parameter.shape)}: convert the model again",
            )
    if further := sorted(weights.taken.keys() - parameters.keys()):
        raise GgufError(weights.gguf.path, f"tensor {weights.taken[further[0]].name} has no place in the model: convert the model again")


@torch.no_grad()
def _put_matrices(model: PreTrainedModel, weights: GgufWeights, dtype: torch.dtype, tied: bool) -> None:
    """Replace each `_Missing` by a layer of the file's blocks: q, k and v as one, and gate and up as one."""
    missing = [path for path, module in model.named_modules() if isinstance(module, _Missing)]
    embedding = next(path for path in missing if path.endswith("embed_tokens"))
    source = {path: f"{embedding if path == 'lm_head' and tied else path}.weight" for path in missing}
    arena = Arena(sum(room(_packed_bytes(weights.taken[name])) for path, name in source.items() if path != embedding))
    tensor = weights.taken[source[embedding]]
    _replace(model, embedding, GgmlEmbedding(weights.rows(source[embedding]), tensor.type, tensor.shape[1], dtype))
    for stack, paths in _groups(model, [path for path in missing if path != embedding]):
        parts = [_projection(weights, source[path], f"{path}.bias", dtype, arena) for path in paths]
        _put(model, stack, paths, parts)
        for path in paths:
            weights.release(source[path])


def _groups(model: nn.Module, paths: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of a stack and those of its parts; for a layer that is in no stack, its own path twice."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        holder = model.get_submodule(parent)
        if not isinstance(holder, Projections) or name not in holder.PARTS:
            yield path, [path]
        elif name == holder.PARTS[0]:
            yield f"{parent}.{holder.STACK}", [f"{parent}.{child}" for child in holder.PARTS]


def _projection(weights: GgufWeights, name: str, bias: str, dtype: torch.dtype, arena: Arena) -> _Projection:
    tensor = weights.taken[name]
    values = weights.widen(bias).to(dtype) if bias in weights.taken else None
    return _Projection(weights.rows(name), tensor.type, tensor.shape[1], values, dtype, arena)


def _put(model: PreTrainedModel, stack: str, paths: list[str], parts: list[_Projection]) -> None:
    """Put the layer of `parts` at `stack`, with a `Slice` of it at each of `paths` if these are others."""
    if paths == [stack]:
        _replace(model, stack, parts[0].stacked([]))
        return
    for path, part in zip(paths, parts, strict=True):
        _replace(model, path, Slice(part))
    _replace(model, stack, Stack(parts))


def _packed_bytes(tensor: Tensor) -> int:
    outputs, inputs = tensor.shape
    return packed_ggml_bytes(outputs, inputs, tensor.type)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


class _Widened:
    """A parameter that is widened when transformers asks for it. Replaces a safetensors slice."""

    def __init__(self, weights: GgufWeights, name: str) -> None:
        self._weights, self._name = weights, name

    def __getitem__(self, index: object) -> torch.Tensor:
        assert index is Ellipsis, index
        return self._weights.widen(self._name)

    def get_shape(self) -> list[int]:
        return list(self._weights.taken[self._name].shape)

    def get_dtype(self) -> str:
        return "F32"


def _dequantize(rows: torch.Tensor, kind: str) -> torch.Tensor:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(numpy.ascontiguousarray(dequantize(rows.numpy(), GGMLQuantizationType[kind])))


def _map(path: Path) -> tuple[mmap.mmap, torch.Tensor]:
    """Return the mapped file, also as bytes. The mapping is private: torch knows no tensors that are read only."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return mapped, torch.frombuffer(mapped, dtype=torch.uint8)
