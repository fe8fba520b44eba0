"""Default KV memory budget."""

import os
from pathlib import Path

import torch

CPU_SHARE = 0.5
"""Share of the memory that is free after the weights are loaded. The rest is for activations, the API process and other processes of the
pod."""
CPU_MOST = 4 << 30
"""vLLM's CPU backend takes 4 GiB by default too (VLLM_CPU_KVCACHE_SPACE). Pages take physical memory shortly before they are used."""
GPU_SHARE = 0.85
"""Share of the device memory that is free after the weights are loaded. The rest is for activations of the largest step."""


def kv_budget(device: torch.device, ranks: int = 1) -> int:
    """Return the bytes for KV on `device`, measured now. `ranks`: processes that share a host's memory when the device is the host."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return host_kv_budget(free_memory(), ranks)


def host_kv_budget(free: int, ranks: int = 1) -> int:
    """Return the bytes for KV of each of `ranks` processes on a host with `free` bytes, once the weights are loaded."""
    return min(CPU_MOST, int(free * CPU_SHARE)) // ranks


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still use: the machine's available memory, or less under a cgroup v2 limit.

    Inactive file cache counts as free, as in the kubelet's working set, because reading the weights has filled it up to the limit. Half of
    the machine's memory counts as available if Linux does not report it.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + int(stat.get("inactive_file", 0))))
