"""Threads that share a step."""

import os
import subprocess
import sys

import pytest

from fairlead_worker.native.library import native

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels on this machine: the engine does without them")
ONE_ITEM = """
import threading
import time
from pathlib import Path
from statistics import median
import torch
from fairlead_worker.native.linear import NativeLinear

def running():
    stats = [task.joinpath("stat").read_text() for task in Path("/proc/self/task").iterdir() if task.name != str(threading.get_native_id())]
    return sum(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)

def pack():
    for _ in range(4):
        NativeLinear(weight, None, quantized=True)

torch.set_num_threads(2)
weight = torch.randn(32, 400_000)
seen, packing = [], threading.Thread(target=pack)
packing.start()
while packing.is_alive():
    seen.append(running())
    time.sleep(0.001)
print(median(seen))
"""
"""32 outputs are one panel, which one thread packs while the other waits for it. Counted is who wants a core, whether he has it or not."""


def test_threads_that_wait_for_long_sleep() -> None:
    """The kernel moves a thread whose core is taken to a core that sleeps, not to one where another waits; and quotas count waiting."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the engine has it
    run = subprocess.run([sys.executable, "-c", ONE_ITEM], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert float(run.stdout) == 1
