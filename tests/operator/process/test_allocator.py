"""Large blocks stay out of the heap, measured by the C library in a process of its own: the limits are those of a whole process."""

import ctypes
import subprocess
import sys

import pytest

APART = """
import ctypes, sys
from fairlead_operator.process import memory

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("heap", "a", "b", "blocks", "apart", "c", "d", "used", "free", "top")]

library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
if "limited" in sys.argv:
    memory.limit_heap()
page = bytearray(8 << 20)
del page  # by which glibc raises its own bound to 8 MiB
before = library.mallinfo2().apart
buffer = bytearray(1 << 20)
print(library.mallinfo2().apart - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc 2.33 or newer")
def test_after_a_page_of_a_list_a_buffer_is_still_kept_out_of_the_heap() -> None:
    def apart(*how: str) -> int:
        return int(subprocess.run([sys.executable, "-c", APART, *how], capture_output=True, text=True, check=True).stdout)

    assert apart("limited") >= 1 << 20
    assert apart() == 0, "glibc no longer raises its bound by itself: limit_heap() can be removed"
