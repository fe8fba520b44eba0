"""The structs of src/decoder.h."""

import ctypes

Pointer = ctypes.c_void_p
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "squared_relu", "xielu")
"""In the order of `Activation.function`."""
UNCHANGED, ROOT_MEAN_SQUARE, AROUND_MEAN = range(3)
"""As `NormKind`."""
MLP_ROWS = 512
"""Rows whose gated inner values are held together."""


class Norm(ctypes.Structure):
    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("width", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    )


class Rope(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("cosine", "sine", "growth")),
        ("half", ctypes.c_int64),
        ("neighbours", ctypes.c_int32),
        ("before_norms", ctypes.c_int32),
    )


class Activation(ctypes.Structure):
    _fields_ = (("function", ctypes.c_int32), *((name, ctypes.c_float) for name in ("positive", "negative", "slope")))


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Norm) for name in ("before_attention", "query", "key", "after_attention", "before_mlp", "after_mlp")),
        *((name, Pointer) for name in ("qkv", "out", "gate_up", "down", "attention")),
        ("activation", Activation),
        *((name, ctypes.c_int32) for name in ("rope", "gated", "parallel", "group")),
    )


class Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", Pointer),
        ("count", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("ropes", Pointer),
        ("head", Pointer),
        ("final", Norm),
        ("kind", ctypes.c_int32),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("steps", "positions", "sampling")),
        ("samples", ctypes.c_int64),
        *((name, Pointer) for name in ("last", "last_positions", "embedded", "logits")),
        *((name, Pointer) for name in ("residual", "update", "normed", "qkv", "attended", "gated", "sampled", "chosen", "asking")),
    )
