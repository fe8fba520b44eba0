"""Rendezvous of a model's ranks, for torch.distributed: a file on one node, the leader's store over several nodes.

torch's TCPStore, gloo and NCCL do not authenticate; network policies keep other clients away from them.
"""

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import FileStore as FileStore  # type: ignore[attr-defined]  # exported, but not in its stubs
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported, but not in its stubs
from torch.distributed import Store as Store  # type: ignore[attr-defined]

LOADING = timedelta(hours=1)
"""How long a rank waits for another: long enough for a slow volume. A rank that died is noticed sooner, by the watcher of its process."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one node use the loopback interface only, so that no port is reachable from outside. The environment takes precedence."""


def file_store(directory: Path) -> Store:
    """Return a store in a file of the folder that the ranks of one node share."""
    _on_loopback()
    return FileStore(str(directory / "store"))


def host_store(listener: socket.socket, size: int) -> Store:
    """Return the leader's store, on a socket that already listens and that the store takes over."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_loopback:
        _on_loopback()
    name = "localhost" if ip_address(host).is_unspecified else host
    return TCPStore(name, port, size, is_master=True, timeout=LOADING, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(address: str, size: int) -> Store:
    """Return a client of the leader's store: `address` is HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        _on_loopback()
    return TCPStore(host, int(port), size, is_master=False, timeout=LOADING, wait_for_workers=False)


def within(store: Store, prefix: str) -> Store:
    """Return a part of `store` of its own."""
    return PrefixStore(prefix, store)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _on_loopback() -> None:
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
