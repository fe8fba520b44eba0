"""CPU limits of `bench/common/cpu_limit.py`: which group a process is in while it is measured, and that nothing stays."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.common.cpu_limit import ROOT, NoLimits, limit_cpu


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def group_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def test_a_limited_process_has_a_group_and_returns_to_the_first_one(pid: int) -> None:
    before = group_of(pid)
    try:
        with limit_cpu([pid], 0.5):
            assert f"/fairlead-bench-{pid}" in group_of(pid)
    except NoLimits as error:
        pytest.skip(str(error))
    assert "fairlead-bench" not in group_of(pid) and group_of(pid).splitlines() == before.splitlines()
    assert not list(ROOT.glob(f"**/fairlead-bench*{pid}"))
