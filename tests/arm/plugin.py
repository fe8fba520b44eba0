"""A pytest plugin: the compiled kernels are Arm's, run by qemu-user on a machine that is no Arm (`python -m tests.arm` gives it).

Python and torch stay this machine's. Each call of the library goes to a process of the emulator that sees this process's memory at the same
addresses (driver.c), so the tests of the kernels are the same ones.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from fairlead_worker.platform import isa

LEVEL, LIBRARY, DRIVER = (os.environ[f"FAIRLEAD_TEST_ARM_{name}"] for name in ("LEVEL", "LIBRARY", "DRIVER"))
QEMU = ("qemu-aarch64-static", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")


class Emulated:
    """The driver process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*QEMU, DRIVER, LIBRARY, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def call(self, name: str, whole: Sequence[int], floats: Sequence[float]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        said = [name, len(whole), *whole, len(floats), *(number.hex() for number in floats)]
        with self._lock:
            self._process.stdin.write(" ".join(map(str, said)) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the emulator ended in {name} with status {self._process.wait()}"
        return int(answer)


class Function:
    """Called as ctypes calls a function of a library."""

    argtypes: Any = None
    restype: Any = ctypes.c_int

    def __init__(self, emulated: Emulated, name: str) -> None:
        self._emulated, self._name = emulated, name

    def __call__(self, *arguments: Any) -> Any:
        whole: list[int] = []
        floats: list[float] = []
        for given in arguments:
            value = ctypes.addressof(given._obj) if hasattr(given, "_obj") else getattr(given, "value", given)
            if isinstance(value, float) or isinstance(given, ctypes.c_float):
                floats.append(float(value))
            else:
                whole.append(int(value or 0))
        answer = self._emulated.call(self._name, whole, floats)
        return None if self.restype is None else self.restype(answer).value


class Library:
    """What `ctypes.CDLL` gives."""

    def __init__(self, path: str) -> None:
        self._emulated = Emulated()
        exported = subprocess.run(["aarch64-linux-gnu-nm", "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True)
        self._names = {line.split()[-1] for line in exported.stdout.splitlines()}

    def __getattr__(self, name: str) -> Function:
        if name not in self._names:
            raise AttributeError(name)
        function = Function(self._emulated, name)
        setattr(self, name, function)
        return function


class _Ctypes:
    CDLL = Library
    c_void_p = ctypes.c_void_p


def pytest_configure(config: pytest.Config) -> None:
    """Before any module of the worker asks for the level or the library."""
    isa.cpu_level = lambda: LEVEL  # type: ignore[assignment]
    isa.LEVELS, isa.PRODUCTS = ("none", "neon", "neon_bf16"), "neon_bf16"  # type: ignore[assignment]
    from fairlead_worker.native import library

    library.ctypes = _Ctypes  # type: ignore[assignment]
    library.LEVELS, library.LOWEST = {"neon": (), "neon_bf16": ()}, "neon"
    library.current = lambda: True  # type: ignore[assignment]
