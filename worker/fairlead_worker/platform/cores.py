"""The number of cores that this process may use: its affinity, and the CPU quotas of its control groups (cgroup v1 or v2)."""

import os
from pathlib import Path

RESERVE_FROM = 3
"""Cores from which the engine leaves one to the API process. With two cores it uses both: a decode step reads all weights, and one core
reads half as fast as two (19.6 against 35.3 GB/s on a 2-core machine), while the API needs only some 0.05 ms of a core per token."""


def engine_threads(root: Path = Path("/")) -> int:
    """Return the number of threads for the engine's computation."""
    cores = usable_cores(root)
    return cores - 1 if cores >= RESERVE_FROM else cores


def usable_cores(root: Path = Path("/")) -> int:
    """Return the usable whole cores, at least one. Threads above the CPU quota are throttled together for most of every period."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limits = [float(affinity), *_quotas(root)]
    return max(1, int(min(limits)))


def _quotas(root: Path) -> list[float]:
    """Return the quota in cores of each control group of this process and of all groups above it."""
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (controllers, "cpu") if controllers else ("", "unified"):
            # In a container the path may be the host's while the mount's root is the container's own group. So all levels are read.
            parts = [part for part in group.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                folder = root.joinpath("sys/fs/cgroup", mount, *parts[:depth])
                quota = _quota_v2(folder) if not controllers else _quota_v1(folder)
                if quota is not None:
                    quotas.append(quota)
    return quotas


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    return _ratio(quota, period)


def _quota_v1(folder: Path) -> float | None:
    """Return the quota in cores; -1 in the file means no limit."""
    return _ratio(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
