"""FlashInfer's wrappers with their real Python code, whose `plan` calls the real host planner in a shared library without CUDA."""

import ctypes
import hashlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bench.gpu.kernels import ENVIRONMENT, environment, site

SOURCE = Path(__file__).with_name("planner.cpp")
SCHEDULER = "attention/scheduler.cuh"
HEADERS = ("attention/heap.h", "utils.cuh", "allocator.h", "exception.h")
"""What it includes of FlashInfer, except for POSITIONS."""
POSITIONS = "#pragma once\nnamespace flashinfer { enum class PosEncodingMode { kNone }; }\n"
"""For pos_enc.cuh, which has device code that only nvcc compiles."""
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-DNDEBUG", "-w")
"""-Bsymbolic: torch may have loaded the real CUDA runtime."""
DECODE, PREFILL, PREFILL_SM90 = 10, 15, 9
"""Numbers in a plan of each kind."""


class PlanFailed(RuntimeError):
    """FlashInfer refused to plan: a workspace is too small, or arguments do not fit each other."""


@dataclass(frozen=True, slots=True)
class Device:
    """What the planner asks of a GPU. `registers`: of a thread of the decode kernel, which bounds its blocks per multiprocessor."""

    processors: int
    shared_per_processor: int = 233472
    shared_per_block: int = 232448
    registers: int = 64


@dataclass(slots=True)
class Plan:
    """A plan, and the part of the int workspace that it wrote on the device."""

    numbers: tuple[int, ...]
    content: bytes
    graph: bool

    def ints(self, offset: int, count: int) -> list[int]:
        return memoryview(self.content[offset : offset + 4 * count]).cast("i").tolist()


class _Workspace(ctypes.Structure):
    _fields_ = (
        ("float_bytes", ctypes.c_size_t),
        ("int_buffer", ctypes.c_void_p),
        ("pinned", ctypes.c_void_p),
        ("int_bytes", ctypes.c_size_t),
    )


@dataclass(slots=True)
class Planner:
    """The planner's library on `device`. `plans`: every plan that was made, oldest first."""

    library: ctypes.CDLL
    device: Device
    plans: list[Plan] = field(default_factory=list)

    def module(self, backend: str) -> SimpleNamespace:
        """Return what FlashInfer's wrappers get as their compiled module."""
        return SimpleNamespace(plan={"decode": self._decode, "fa2": self._prefill, "fa3": self._prefill_sm90}[backend])

    def _decode(self, floats: Any, ints: Any, pinned: Any, indptr: Any, *more: Any) -> list[int]:
        batch, heads, kv_heads, page_size, graph, _window, _cap, dim, *_ = more
        return self._run("plan_decode", DECODE, (floats, ints, pinned), graph, indptr, batch, heads, kv_heads, page_size, graph, dim)

    def _prefill(self, floats: Any, ints: Any, pinned: Any, queries: Any, indptr: Any, lengths: Any, *more: Any) -> list[int]:
        *shape, _causal, window, split, disabled, colocated, uniform = more
        assert colocated == 0
        given = (queries, indptr, *shape, window, split, disabled, ctypes.c_int64(uniform), 2)
        return self._run("plan_prefill", PREFILL, (floats, ints, pinned), shape[5], *given)

    def _prefill_sm90(self, floats: Any, ints: Any, pinned: Any, queries: Any, indptr: Any, lengths: Any, *more: Any) -> list[int]:
        *shape, causal, _window = more
        given = (queries, indptr, lengths, *shape, causal)
        return self._run("plan_prefill_sm90", PREFILL_SM90, (floats, ints, pinned), shape[5], *given)

    def _run(self, name: str, count: int, spaces: tuple[torch.Tensor, ...], graph: bool, *arguments: Any) -> list[int]:
        floats, ints, pinned = spaces
        assert pinned.numel() >= ints.numel() and all(part.dtype == torch.uint8 for part in spaces)
        device = (ctypes.c_uint8 * ints.numel())()
        space = _Workspace(floats.numel(), ctypes.addressof(device), pinned.data_ptr(), ints.numel())
        result, copied = (ctypes.c_int64 * count)(), ctypes.c_int64()
        given = []
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                assert argument.device.type == "cpu" and argument.dtype == torch.int32 and argument.is_contiguous()
                argument = ctypes.c_void_p(argument.data_ptr())
            given.append(argument)
        answer = self.device
        self.library.describe_device(answer.processors, answer.shared_per_processor, answer.shared_per_block, answer.registers)
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        if error := function(ctypes.byref(space), *given, result, ctypes.byref(copied)):
            raise PlanFailed(error.decode())
        self.plans.append(Plan(tuple(result), bytes(memoryview(device)[: copied.value]), graph))
        return list(result)


def compile_planner() -> ctypes.CDLL:
    """Return the planner's library, compiled once for the same sources."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler is not None
    headers, cuda = site() / "flashinfer" / "data" / "include" / "flashinfer", site() / "nvidia" / "cu13" / "include"
    texts = {"pos_enc.cuh": POSITIONS, **{name: (headers / name).read_text() for name in (SCHEDULER, *HEADERS)}}
    key = hashlib.sha256("\0".join([compiler, *FLAGS, SOURCE.read_text(), *texts.values()]).encode()).hexdigest()[:16]
    built = ENVIRONMENT.folder / "planner" / f"{key}.so"
    if not built.exists():
        built.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=built.parent) as folder:
            for name, text in texts.items():
                path = Path(folder, "flashinfer", name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            folders = [f"-isystem{include}" for include in (folder, cuda, cuda / "cccl")]
            partial = Path(folder, "planner.so")
            command = [compiler, *FLAGS, *folders, str(SOURCE), "-o", str(partial)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stderr[-3000:]
            partial.replace(built)
    return ctypes.CDLL(str(built))


@contextmanager
def flashinfer_modules() -> Iterator[ModuleType]:
    """Import the real FlashInfer; afterwards other tests do not find it."""
    before = set(sys.modules)
    sys.path.append(str(site()))
    with mock.patch.dict(os.environ, environment()):
        try:
            yield importlib.import_module("flashinfer")
        finally:
            sys.path.remove(str(site()))
            for name in set(sys.modules) - before:
                if name.split(".")[0] == "flashinfer":
                    del sys.modules[name]


@dataclass(frozen=True, slots=True)
class PlanningLibrary:
    """`Library` of the backend: the wrappers of `flashinfer`, whose workspaces have a size and no memory (torch's meta device)."""

    flashinfer: ModuleType
    planner: Planner

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **named: Any) -> Any:
        return self._wrapper("BatchPrefillWithPagedKVCacheWrapper", *arguments, **named)

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **named: Any) -> Any:
        return self._wrapper("BatchDecodeWithPagedKVCacheWrapper", *arguments, **named)

    def _wrapper(self, name: str, *arguments: Any, **named: Any) -> Any:
        # Pinned memory needs a GPU.
        empty = torch.empty
        with mock.patch.object(torch, "empty", lambda *shape, pin_memory=False, **other: empty(*shape, **other)):
            made = getattr(self.flashinfer, name)(*arguments, **named)
        plan = made.plan

        def planned(*arguments: Any, **named: Any) -> None:
            decode, prefill = self.flashinfer.decode, self.flashinfer.prefill
            with (
                mock.patch.object(decode, "get_batch_decode_module", lambda *_: self.planner.module("decode")),
                mock.patch.object(decode, "get_batch_prefill_module", lambda backend, *_: self.planner.module(backend)),
                mock.patch.object(prefill, "get_batch_prefill_module", lambda backend, *_: self.planner.module(backend)),
            ):
                plan(*arguments, **named)

        made.plan = planned
        return made
