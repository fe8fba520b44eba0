"""Threads follow the CPU quota of the pod, whichever version of control groups the node has."""

import os
from pathlib import Path

import pytest

from fairlead_worker.platform.cores import engine_threads, usable_cores


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root directory with these control groups."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    "groups, files, cores",
    [
        ("0::/", {"sys/fs/cgroup/cpu.max": "max 100000"}, 8),
        ("0::/", {"sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
        ("0::/", {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ("0::/pod/container", {"sys/fs/cgroup/pod/cpu.max": "250000 100000", "sys/fs/cgroup/pod/container/cpu.max": "max 100000"}, 2),
        ("0::/../other", {"sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        (
            "3:cpu,cpuacct:/",
            {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000"},
            8,
        ),
        ("1:cpu:/", {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
        (
            "3:cpuset:/\n2:cpu:/kubepods/pod7\n0::/",
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("0::/", {"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        ("", {}, 8),
    ],
)
def test_the_quota_bounds_the_cores(tmp_path: Path, groups: str, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, groups, files)) == cores


@pytest.mark.parametrize("quota, threads", [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_from_three_cores_on_one_is_the_apis(tmp_path: Path, quota: int, threads: int) -> None:
    assert engine_threads(machine(tmp_path, "0::/", {"sys/fs/cgroup/cpu.max": f"{quota * 100000} 100000"})) == threads
