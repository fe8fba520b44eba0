"""Free memory as the kernel reports it, with and without a cgroup limit."""

from pathlib import Path

import pytest

from fairlead_worker.execution.memory import free_memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "used", "cache", "free"),
    [
        ("max", 900, 0, 1000),
        ("600", 400, 0, 200),
        ("600", 600, 350, 350),  # the weights were read: all the limit is "used", and most of it is cache
        ("5000", 100, 0, 1000),  # the machine has less than the limit allows
        ("600", 700, 0, 0),
    ],
)
def test_free_memory(tmp_path: Path, limit: str, used: int, cache: int, free: int) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 4096000 kB\nMemAvailable: {1000 * 1024} kB\n")
    (tmp_path / "memory.max").write_text(limit if limit == "max" else str(int(limit) * MIB))
    (tmp_path / "memory.current").write_text(str(used * MIB))
    (tmp_path / "memory.stat").write_text(f"anon {(used - cache) * MIB}\nfile {cache * MIB}\ninactive_file {cache * MIB}\n")
    assert free_memory(tmp_path, tmp_path) == free * MIB


def test_no_cgroup(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 2048 kB\n")
    assert free_memory(tmp_path, tmp_path / "none") == 2 * MIB
