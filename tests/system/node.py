"""A node as a network namespace with one link: what runs there can vanish without a FIN. Needs root and iproute2."""

import os
import shutil
import subprocess
from types import TracebackType


def why_not() -> str:
    """Return why no node can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "a network namespace needs root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"fairlead-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


class Node:
    """A context manager. Processes started with `prefix` run there and listen on `address`, which this machine reaches.

    `index` (0 to 3) distinguishes the nodes of one process.
    """

    def __init__(self, index: int = 0) -> None:
        number = (4 * os.getpid() + index) % 16384
        network = f"198.18.{number // 64}.{number % 64 * 4}".rsplit(".", 1)  # from the range for benchmarks, RFC 2544
        self._here, self.address = (f"{network[0]}.{int(network[1]) + host}" for host in (1, 2))
        self._name, self._link = f"fairlead-{os.getpid()}-{index}", f"fl{os.getpid()}-{index}"
        self.prefix = ("ip", "netns", "exec", self._name)

    def __enter__(self) -> "Node":
        _ip("netns", "add", self._name)
        try:
            self._connect()
        except BaseException:
            _ip("netns", "del", self._name)
            raise
        return self

    def _connect(self) -> None:
        _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._name)
        _ip("addr", "add", f"{self._here}/30", "dev", self._link)
        _ip("link", "set", self._link, "up")
        _ip("-n", self._name, "addr", "add", f"{self.address}/30", "dev", "eth0")
        self._up()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _ip("link", "del", self._link)  # the kernel removes the namespace's end of the link, and its name, only after a while
        _ip("netns", "del", self._name)

    def lose_power(self) -> None:
        """Make the host silent: connecting fails with "no route to host" after a while."""
        _ip("-n", self._name, "link", "set", "eth0", "down")

    def lose_answers(self) -> None:
        """Drop all packets that the node sends; packets to it still arrive."""
        _ip("-n", self._name, "route", "add", "blackhole", f"{self._here}/32")

    def come_back(self) -> None:
        subprocess.run(["ip", "-n", self._name, "route", "del", "blackhole", f"{self._here}/32"], capture_output=True, check=False)
        self._up()

    def _up(self) -> None:
        _ip("-n", self._name, "link", "set", "lo", "up")
        _ip("-n", self._name, "link", "set", "eth0", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
