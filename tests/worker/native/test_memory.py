"""Memory that is resident before it is used."""

import ctypes
import mmap
import os
import threading

import pytest
import torch

from fairlead_worker.native.memory import HUGE_PAGE, MADV_POPULATE_WRITE, PAGE, Arena, Resident


def populates() -> bool:
    try:
        mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).madvise(MADV_POPULATE_WRITE)
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not populates(), reason="this kernel makes no memory resident ahead of use (Linux 5.14 does)")
ROW = 8192
"""Bytes of a page of each tensor: two of the kernel's."""


def resident(tensor: torch.Tensor) -> list[bool]:
    """Of each of its pages of memory."""
    begin = tensor.data_ptr() // PAGE * PAGE
    count = -(-(tensor.data_ptr() + tensor.nbytes - begin) // PAGE)
    there = (ctypes.c_ubyte * count)()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    if mincore(ctypes.c_void_p(begin), ctypes.c_size_t(count * PAGE), there):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return [bool(each & 1) for each in there]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Two of 4,096 pages, in memory where nothing is resident yet."""
    pages = 4096
    arena = Arena(2 * pages * ROW)
    return [arena.take(pages * ROW).view(pages, ROW) for _ in range(2)]


def test_pages_are_resident_before_they_are_used(tensors: list[torch.Tensor]) -> None:
    ahead, slack = 1024, HUGE_PAGE // ROW  # a huge page is there as a whole
    memory = Resident(tensors, ahead)
    for tensor in tensors:
        assert not any(resident(tensor))
    memory.mark_used(0)
    memory.wait()
    for tensor in tensors:
        assert all(resident(tensor[:ahead]))
        assert not any(resident(tensor[ahead + slack : 4096 - slack]))
    memory.mark_used(ahead // 2 - 1)
    memory.wait()
    assert not any(resident(tensors[0][ahead + slack : 4096 - slack])), "there is enough"
    memory.mark_used(ahead)
    memory.wait()
    assert all(resident(tensors[1][: 2 * ahead]))
    assert not any(resident(tensors[1][2 * ahead + 1 + slack : 4096 - slack]))


def test_large_pages_are_not_many() -> None:
    tensors = [Arena(64 << 20).take(64 << 20).view(16, 4 << 20)]
    memory = Resident(tensors, 0)
    memory.mark_used(0)
    memory.wait()
    assert all(resident(tensors[0][:1]))
    assert not any(resident(tensors[0][3:]))


def test_the_last_page_is_the_end(tensors: list[torch.Tensor]) -> None:
    memory = Resident(tensors, 8192)
    for page in (0, 4095, 4095):
        memory.mark_used(page)
        memory.wait()
    assert all(all(resident(tensor)) for tensor in tensors)


def test_no_thread_is_no_fault(tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = Resident(tensors, 1024)
    memory.mark_used(0)
    memory.mark_used(3000)
    memory.wait()
    tensors[0][3000] = 1


def test_what_is_there_is_kept(tensors: list[torch.Tensor]) -> None:
    tensors[0][5] = 7
    tensors[1][700] = 9
    memory = Resident(tensors, 1024)
    memory.mark_used(0)
    memory.wait()
    assert tensors[0][5].eq(7).all()
    assert tensors[1][700].eq(9).all()
    assert int(tensors[0].sum()) == 7 * ROW
    assert int(tensors[1].sum()) == 9 * ROW
