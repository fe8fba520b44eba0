"""How much memory KV may take when nobody says."""

import os
from pathlib import Path

import torch

CPU_SHARE = 0.5
"""Of the memory free once the weights are loaded: activations, the API process and other pods' neighbours want the rest."""
CPU_MOST = 4 << 30
"""vLLM's CPU backend takes 4 GiB by default too (VLLM_CPU_KVCACHE_SPACE); pages take memory shortly before they are used."""
GPU_SHARE = 0.85
"""Of the device memory free once the weights are loaded: the rest is for activations of the largest step."""


def kv_budget(device: torch.device, ranks: int = 1) -> int:
    """Bytes for KV on `device`, measured now. `ranks`: processes that share a host's memory where that is the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_SHARE)
    return min(CPU_MOST, int(free_memory() * CPU_SHARE)) // ranks


def free_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process could still use: the machine's available memory, or less under a cgroup v2 limit.

    Inactive file cache counts as free, as in the kubelet's working set: reading the weights has filled it, up to the limit. Where Linux
    does not say what is available, half of the machine's memory is taken for it.
    """
    available = 0
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except OSError:
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used + int(stat.get("inactive_file", 0))))
