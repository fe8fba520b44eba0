"""CPU limits of processes by cgroups, like those of pods: so workers on one machine do not take time from each other.

Without limits, work on an idle worker slows the busy ones down, and a router that spreads requests loses what it would gain on machines of
their own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_MICROSECONDS = 10_000
"""Shorter than the usual 100 ms, so that a limited process pauses for milliseconds."""


class NoLimits(Exception):
    """This machine does not let the caller limit processes. The text says why."""


@contextlib.contextmanager
def limit_cpu(pids: Sequence[int], cores: float) -> Iterator[None]:
    """Limit each process of `pids`, with its descendants, to `cores`, with the highest weight beside other work. Raises NoLimits."""
    is_second = (ROOT / "cgroup.controllers").exists()
    quota = int(cores * PERIOD_MICROSECONDS)
    limits = (
        {"cpu.max": f"{quota} {PERIOD_MICROSECONDS}", "cpu.weight": "10000"}
        if is_second
        else {"cpu.cfs_period_us": str(PERIOD_MICROSECONDS), "cpu.cfs_quota_us": str(quota), "cpu.shares": "262144"}
    )
    parent = ROOT if is_second else ROOT / "cpu"
    groups = [parent / f"fairlead-bench-{pid}" for pid in pids]
    try:
        try:
            for pid, group in zip(pids, groups, strict=True):
                group.mkdir()
                for setting, value in limits.items():
                    (group / setting).write_text(value)
                for each in (pid, *_descendants(pid)):
                    (group / "cgroup.procs").write_text(str(each))
        except OSError as error:
            raise NoLimits(f"CPU limits need root and the cpu controller of cgroups: {error}") from None
        yield
    finally:
        for group in filter(Path.exists, groups):
            for process in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (parent / "cgroup.procs").write_text(process)
            with contextlib.suppress(OSError):
                group.rmdir()


def _descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, directly or not."""
    parents: dict[int, list[int]] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(process.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found
