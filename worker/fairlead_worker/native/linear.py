"""Linear layers in the library's own layout (`src/gemm.c`)."""

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import nn

from fairlead_worker.native.library import NativeLibrary, native, pointer
from fairlead_worker.native.memory import Arena, room

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""As `Kind` in native.h."""
ROUNDED = {"int8": 2, "int4": 4}
"""As `Kind`, for quantized weights."""
PANEL = 32
"""Outputs that are packed together."""


class Panel(ctypes.Structure):
    """`Panel` of native.h."""

    _fields_ = [("weights", ctypes.c_void_p), ("kind", ctypes.c_int64)]


class Linear(ctypes.Structure):
    """`Linear` of native.h."""

    _fields_ = [
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("kinds", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    ]


class NativeLinear(nn.Module):
    """`nn.Linear` with its weight in panels that only the library can read. The plain weight is released. Float32 or bfloat16, on a CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, quantization: str = "none", arena: Arena | None = None) -> None:
        """weight [out_features, in_features] of any strides; bias [out_features].

        quantization: none; int8: each output by its largest weight; int4: each 32 inputs of an output, as ggml's Q4_1, times a power of two
        for the output. arena: memory of the packed weight; None: its own. Raises KeyError for another dtype.
        """
        super().__init__()
        packed = ROUNDED.get(quantization, KINDS[weight.dtype])
        size = packed_bytes(weight.shape, weight.dtype, quantization)
        memory = (arena or Arena(room(size))).take(size)
        scales = None if quantization == "none" else torch.empty(len(weight))
        fill_panels(memory, packed, weight.detach(), scales)
        self._describe(weight.shape, weight.dtype, quantization, [memory], panel_table(memory, packed, len(weight)), scales, bias)

    def _describe(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        quantization: str,
        memory: Sequence[torch.Tensor],
        panels: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        """Keep the packed weight [out_features, in_features]. panels: [panels, 2] int64, each a `Panel`, in `memory`."""
        self.out_features, self.in_features = shape
        self.dtype, self.quantization = dtype, quantization
        # Not parameters: only the library understands them.
        self.memory, self.panels, self.scales = memory, panels, scales
        self.bias = None if bias is None else bias.detach().to(dtype).contiguous()
        kinds = sum(1 << kind for kind in set(panels[:, 1].tolist()))
        self.native = Linear(
            self.in_features, self.out_features, panels.data_ptr(), _address(scales), _address(self.bias), kinds, KINDS[dtype]
        )  # fmt: skip

    @property
    def weight(self) -> torch.Tensor:
        """Return a copy of the weight, for code of a family that does not call the layer, as some routers do not theirs."""
        return self.widen(0, self.out_features).to(self.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._compute(inputs, self.dtype)

    def compute_float32(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the same sums, not rounded, in float32."""
        return self._compute(inputs, torch.float32)

    def widen(self, begin: int, end: int) -> torch.Tensor:
        """Return the weights that the packed form stands for, of outputs `begin` to `end`: [end - begin, in_features] float32."""
        if not 0 <= begin <= end <= self.out_features:
            raise IndexError(f"outputs {begin} to {end} of {self.out_features}")
        weights = torch.empty(end - begin, self.in_features)
        library().fairlead_unpack(torch.get_num_threads(), ctypes.byref(self.native), begin, end, weights.data_ptr())
        return weights

    def _compute(self, inputs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if inputs.dtype != self.dtype or inputs.shape[-1] != self.in_features:
            raise RuntimeError(f"{self} got {inputs.dtype} {list(inputs.shape)}")
        rows = inputs.reshape(-1, self.in_features).contiguous()
        answer = torch.empty(len(rows), self.out_features, dtype=dtype)
        library().fairlead_linear(
            torch.get_num_threads(), ctypes.byref(self.native), rows.data_ptr(), self.in_features, len(rows),
            answer.data_ptr(), self.out_features, KINDS[dtype],
        )  # fmt: skip
        return answer.view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        kind = self.dtype if self.quantization == "none" else self.quantization
        return f"{self.in_features}, {self.out_features}, {kind}, bias={self.bias is not None}"


class NativeLinears(nn.ModuleList):
    """Several layers of one size, each with rows of its own: one call computes all."""

    def __init__(self, weights: torch.Tensor) -> None:
        """weights [layers, out_features, in_features]."""
        arena = Arena(len(weights) * room(packed_bytes(weights[0].shape, weights.dtype)))
        layers = [NativeLinear(weight, None, arena=arena) for weight in weights]
        super().__init__(layers)
        self.outputs, self.dtype = weights.shape[1], weights.dtype
        self._native = (Linear * len(weights))(*(layer.native for layer in layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [T, layers, out_features] of inputs [T, layers, in_features] with any strides between tokens and layers."""
        inputs = inputs if inputs.stride(2) == 1 else inputs.contiguous()
        answer = torch.empty(*inputs.shape[:2], self.outputs, dtype=self.dtype)
        library().fairlead_linears(
            torch.get_num_threads(), self._native, len(self), inputs.data_ptr(), inputs.stride(0), inputs.stride(1), len(inputs),
            answer.data_ptr(), answer.stride(0), answer.stride(1),
        )  # fmt: skip
        return answer


def packed_bytes(shape: torch.Size, dtype: torch.dtype, quantization: str = "none") -> int:
    """Return the bytes of a packed weight [outputs, inputs]."""
    size: int = library().fairlead_packed_bytes(ROUNDED.get(quantization, KINDS[dtype]), *shape)
    return size


def fill_panels(packed: torch.Tensor, kind: int, weight: torch.Tensor, scales: torch.Tensor | None = None) -> None:
    """Pack `weight` [outputs, inputs], float32 or bfloat16 of any strides, as panels of `kind`. scales [outputs]: filled if rounded."""
    library().fairlead_pack(
        torch.get_num_threads(), KINDS[weight.dtype], kind, pointer(weight), *weight.shape, *weight.stride(),
        pointer(packed), _address(scales),
    )  # fmt: skip


def panel_table(packed: torch.Tensor, kind: int, outputs: int) -> torch.Tensor:
    """Return the panels that `packed` consists of, [panels, 2] int64: each a `Panel`."""
    panels = -(-outputs // PANEL)
    at = packed.data_ptr() + torch.arange(panels) * (len(packed) // max(panels, 1))
    return torch.stack((at, torch.full_like(at, kind)), 1)


@functools.cache
def library() -> NativeLibrary:
    """Return the library with the argument types of this module's functions. Raises RuntimeError without a library: check `native()`
    first.
    """
    found = native()
    if found is None:
        raise RuntimeError("the native library does not load, see the log")
    i32, i64, address = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    found.fairlead_packed_bytes.argtypes = [i32, i64, i64]
    found.fairlead_packed_bytes.restype = i64
    found.fairlead_pack.argtypes = [i32, i32, i32, address, i64, i64, i64, i64, address, address]
    found.fairlead_pack.restype = None
    found.fairlead_row_bytes.argtypes = [i32, i64]
    found.fairlead_row_bytes.restype = i64
    found.fairlead_pack_blocks.argtypes = [i32, i32, address, i64, i64, i64, address]
    found.fairlead_pack_blocks.restype = None
    found.fairlead_widen_blocks.argtypes = [i32, i32, address, i64, i64, address]
    found.fairlead_widen_blocks.restype = None
    found.fairlead_unpack.argtypes = [i32, ctypes.POINTER(Linear), i64, i64, address]
    found.fairlead_unpack.restype = None
    found.fairlead_linear.argtypes = [i32, ctypes.POINTER(Linear), address, i64, i64, address, i64, i32]
    found.fairlead_linear.restype = None
    found.fairlead_linears.argtypes = [i32, address, i64, address, i64, i64, i64, address, i64, i64]
    found.fairlead_linears.restype = None
    return found


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
