"""Where the ranks of a model find each other, for torch.distributed: a file on one node, a store of the leader's over several.

torch's TCPStore, gloo and NCCL know no keys: network policies keep others away from them.
"""

import os
import socket
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]  # exported without saying so
from torch.distributed import Store as Store  # type: ignore[attr-defined]

LOADING = timedelta(hours=1)
"""How long a rank waits for another: for a slow volume, as whoever watches the processes knows sooner of one that died."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Ranks of one node meet there alone: nothing of theirs listens where others could reach it. The environment wins."""


def file_store(directory: Path) -> Store:
    """Through a file of the folder that the ranks of one node share."""
    _on_loopback()
    return FileStore(str(directory / "store"))


def host_store(listener: socket.socket, size: int) -> Store:
    """The leader's, on a socket that listens already and becomes the store's."""
    host, port = listener.getsockname()[:2]
    if ip_address(host).is_loopback:
        _on_loopback()
    name = "localhost" if ip_address(host).is_unspecified else host
    return TCPStore(name, port, size, is_master=True, timeout=LOADING, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(address: str, size: int) -> Store:
    """The leader's, from any other process: `address` is HOST:PORT."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if is_loopback(host):
        _on_loopback()
    return TCPStore(host, int(port), size, is_master=False, timeout=LOADING, wait_for_workers=False)


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _on_loopback() -> None:
    for name, value in LOOPBACK.items():
        os.environ.setdefault(name, value)
