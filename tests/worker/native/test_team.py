"""Work sharing among the threads of a step."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fairlead_worker.native import build
from fairlead_worker.native.library import native

pytestmark = pytest.mark.skipif(native() is None, reason="the native library is not built, or not for this CPU")
EVERY = (1 << 64) - 1
ONE_ITEM = """
import contextlib
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
        NativeLinear(weight, None, quantization="int8")

torch.set_num_threads(2)
weight = torch.randn(32, 400_000)
NativeLinear(weight[:, :64].contiguous(), None, quantization="int8")  # loads the library: while that waits for the disk, no thread runs
seen, packing = [], threading.Thread(target=pack)
packing.start()
while packing.is_alive():
    with contextlib.suppress(OSError):  # a thread has just ended
        seen.append(running())
    time.sleep(0.001)
print(median(seen))
"""
"""32 outputs are one panel, which one thread packs while the other waits. The count includes every thread that wants a core."""


def test_threads_that_wait_for_long_sleep() -> None:
    """The kernel moves a thread whose core is taken to a core that sleeps, not to one where another waits; and quotas count waiting."""
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the engine has it
    run = subprocess.run([sys.executable, "-c", ONE_ITEM], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert float(run.stdout) == 1


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize(
    ("same", "cores", "mask", "masks"),
    [
        pytest.param(True, 2, EVERY, [0b10, EVERY], id="to the other core, and free to go anywhere again"),
        pytest.param(True, 3, EVERY, [0b110, EVERY], id="to any other core"),
        pytest.param(True, 3, 0b11, [0b10, EVERY, 0b11], id="within what it was narrowed to"),
        pytest.param(True, 1, EVERY, [], id="nowhere to go"),
        pytest.param(True, 2, 0b01, [], id="narrowed to one"),
        pytest.param(False, 2, EVERY, [], id="a core of its own"),
    ],
)
def test_threads_that_wake_on_one_core_part(tmp_path: Path, same: bool, cores: int, mask: int, masks: list[int]) -> None:
    """The kernel leaves two threads on one core that never wait for it at once, however idle the other core is."""
    names = [f"-Dsched_{call}=stand_in_{call}" for call in ("getcpu", "getaffinity", "setaffinity")]
    source, made = Path(__file__).with_name("team_stand_in.c"), tmp_path / "team.so"
    objects = tmp_path / "team.o"
    subprocess.run(["gcc", *build.FLAGS, *build.AVX2, *names, "-I", build.SOURCES, "-c", source, "-o", objects], check=True)
    subprocess.run(["gcc", "-shared", objects, "-o", made], check=True)
    asked = (ctypes.c_uint64 * 4)()
    count = ctypes.CDLL(str(made)).wait_beside(same, cores, ctypes.c_uint64(mask), asked)
    assert asked[:count] == masks
