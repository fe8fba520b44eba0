"""The ctypes structures have the layout of the C ones: a missing or wrong field would corrupt memory silently."""

import ctypes

import pytest

from fairlead_worker.kernels.native import Attention, Step
from fairlead_worker.native.decoder import Activation, Decoder, Layer, Norm, Pass, Rope
from fairlead_worker.native.library import native
from fairlead_worker.native.linear import Linear, Panel

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")


@pytest.mark.parametrize(
    "mirror", [Panel, Linear, Activation, Attention, Step, Norm, Rope, Layer, Decoder, Pass], ids=lambda mirror: mirror.__name__
)
def test_a_mirror_is_as_large_as_its_structure(mirror: type[ctypes.Structure]) -> None:
    library = native()
    assert library is not None
    library.fairlead_size_of.restype = ctypes.c_int64
    assert ctypes.sizeof(mirror) == library.fairlead_size_of(mirror.__name__.encode())
