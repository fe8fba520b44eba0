"""Backend of the compiled library: one call for each layer (`native/src/attention.c`).

Pages are read in place, in tiles of 16 keys that the products use directly; nothing is gathered at any context length. A query's bits
depend on its own KV and position alone, not on the batch, the number of threads or the chunks of a prompt.
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from fairlead_worker.kernels.base import KVSpec, LayerSpec, PackedStep
from fairlead_worker.native.library import native, pointer
from fairlead_worker.native.memory import Arena, Resident, room

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""As `Kind` in native.h."""
Ints = npt.NDArray[np.int32]
AHEAD_BYTES = 128 << 20
"""Bytes of KV that are made resident before they are used."""


class Attention(ctypes.Structure):
    """`Attention` of native.h."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
    ]


class Step(ctypes.Structure):
    """`Step` of native.h."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("starts", "offsets", "page_indptr", "page_indices")),
        ("page_size", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("partials", ctypes.c_void_p),
    ]


def serves(spec: KVSpec) -> bool:
    """Return whether this backend can hold such KV here: the library loads, and the KV is float32 or bfloat16 on the CPU."""
    return spec.device.type == "cpu" and spec.dtype in KINDS and native() is not None


class NativeBackend:
    """Keys and values as [pages, kv_heads, page_size * dim] for each layer, internally in the tiles of attention.c."""

    name = "native"

    def __init__(self, spec: KVSpec, pages: int) -> None:
        library = native()
        if spec.device.type != "cpu" or spec.dtype not in KINDS or library is None:
            why = "the library does not load, see the log" if library is None else f"not {spec.dtype} on {spec.device.type}"
            raise ValueError(f"attention backend 'native' takes float32 and bfloat16 on a CPU: {why}; set --attention-backend auto")
        self.spec = spec
        self.pages = pages
        self.library = library
        self.library.fairlead_partials.restype = ctypes.c_int64
        self.library.fairlead_attention.restype = None
        sizes = [(layer.kv_heads, spec.page_size * dim) for layer in spec.stored for dim in (layer.key_dim, layer.own_value_dim)]
        arena = Arena(sum(room(pages * heads * width * spec.dtype.itemsize) for heads, width in sizes))
        parts = [
            arena.take(pages * heads * width * spec.dtype.itemsize).view(spec.dtype).view(pages, heads, width) for heads, width in sizes
        ]
        self._stored = (*parts[::2], *parts[1::2])
        self.keys, self.values = ([some[place] for place in spec.places] for some in (parts[::2], parts[1::2]))
        self.resident = Resident(parts, AHEAD_BYTES // spec.page_bytes)
        self.resident.mark_used(0)
        self._sinks = [None if layer.sinks is None else torch.tensor(layer.sinks) for layer in spec.layers]
        self.layers = [_attention(*each) for each in zip(spec.layers, self.keys, self.values, self._sinks, strict=True)]

        self._step = GroupedNativeStep if spec.groups else NativeStep

    def plan(self, step: PackedStep) -> "NativeStep":
        self.resident.mark_used(int(step.page_indices.numpy().max()))
        return self._step(self, step)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.index_select(0, pages).flatten(1) for part in self._stored], 1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        parts = self._stored
        for part, piece in zip(parts, torch.split(content, [part[0].numel() for part in parts], 1), strict=True):
            part.index_copy_(0, pages, piece.view(len(pages), *part.shape[1:]))


class NativeStep:
    """One step: each row's tokens and pages, as the library reads them."""

    def __init__(self, backend: NativeBackend, step: PackedStep) -> None:
        offsets = np.zeros(len(step.counts) + 1, np.int32)
        np.cumsum(step.counts, out=offsets[1:])
        self._backend = backend
        self._rows = _Rows(backend, np.array(step.starts, np.int32), offsets, step.page_indptr.numpy(), step.page_indices.numpy())
        self.native: Step | ctypes.Array[Step] = self._rows.native

    def single_token_rows(self, tokens: torch.Tensor) -> "_Rows":
        """Return one-token rows for `tokens` [S] int64 of this step, for the last layer. Its pages hold all of its KV by then."""
        rows, chosen = self._rows, tokens.numpy()
        of = np.searchsorted(rows.offsets, chosen, "right") - 1
        starts = (rows.starts[of] + chosen - rows.offsets[of]).astype(np.int32)
        # The library reads only where a row's pages begin, so the offsets need not rise.
        return _Rows(self._backend, starts, np.arange(len(chosen) + 1, dtype=np.int32), rows.page_indptr[of], rows.page_indices)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        backend, spec = self._backend, self._backend.spec.layers[layer]
        query, key, value = (_rows(each, backend.spec.dtype) for each in (query, key, value))
        output = query.new_empty(query.shape[0], spec.heads, spec.value_dim)
        stored = (key, value) if spec.source is None else (None, None)
        backend.library.fairlead_attention(
            ctypes.c_int32(torch.get_num_threads()),
            ctypes.byref(backend.layers[layer]),
            ctypes.byref(self.native),
            *(argument for tensor in (query, *stored, output) for argument in _argument(tensor)),
        )
        return output


class GroupedNativeStep(NativeStep):
    """One step over several groups of layers: `native` is an array with a `Step` of native.h for each group."""

    def __init__(self, backend: NativeBackend, step: PackedStep) -> None:
        for each in step.others:
            backend.resident.mark_used(int(each.page_indices.numpy().max()))
        self._groups = backend.spec.groups
        self._steps = [NativeStep(backend, each) for each in step.of_groups()]
        self.native = (Step * len(self._steps))(*(each._rows.native for each in self._steps))

    def single_token_rows(self, tokens: torch.Tensor) -> "_Rows":
        return self._steps[self._groups[-1]].single_token_rows(tokens)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self._steps[self._groups[layer]].attend(layer, query, key, value)


class _Rows:
    """A `Step` of native.h and the arrays that its pointers refer to."""

    def __init__(self, backend: NativeBackend, starts: Ints, offsets: Ints, page_indptr: Ints, page_indices: Ints) -> None:
        self.starts, self.offsets, self.page_indptr, self.page_indices = starts, offsets, page_indptr, page_indices
        arrays = (starts, offsets, page_indptr, page_indices)
        self.native = Step(
            len(starts), int(offsets[-1]), *(array.ctypes.data for array in arrays), backend.spec.page_size, KINDS[backend.spec.dtype]
        )
        needed = max(backend.library.fairlead_partials(ctypes.byref(layer), ctypes.byref(self.native)) for layer in _kinds(backend))
        self._partials = torch.empty(needed)
        self.native.partials = self._partials.data_ptr() if needed else None


def _attention(spec: LayerSpec, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None) -> Attention:
    sizes = (spec.heads, spec.kv_heads, spec.key_dim, spec.value_dim)
    sink = None if sinks is None else sinks.data_ptr()
    own = None if spec.value_in_key else values.data_ptr()
    return Attention(keys.data_ptr(), own, *sizes, spec.scaling, spec.softcap or 0, spec.window or 0, spec.chunk or 0, sink)


def _kinds(backend: NativeBackend) -> list[Attention]:
    """Return one layer of each kind; a model has one or two kinds."""
    return [backend.layers[backend.spec.layers.index(spec)] for spec in set(backend.spec.layers)]


def _argument(tensor: torch.Tensor | None) -> tuple[ctypes.c_void_p, ctypes.c_int64]:
    """Return where rows begin and the numbers between them; None: NULL."""
    return (ctypes.c_void_p(), ctypes.c_int64()) if tensor is None else (pointer(tensor), ctypes.c_int64(tensor.stride(0)))


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [T, heads, dim] with any stride between tokens, as in a view of stacked projections. Other layouts are copied."""
    tensor = tensor.to(dtype)
    if tensor.stride(2) == 1 and (tensor.shape[1] == 1 or tensor.stride(1) == tensor.shape[2]):
        return tensor
    return tensor.contiguous()
