"""A second node of a cluster on this machine: its own network, containerd, kubelet and kube-proxy, behind a link to the first node.

Its images are hard links to the first node's: a copy of several GB takes seconds and no space.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from e2e import progress

from . import certificates, components, packages
from .local import ComponentFailed, LocalKubernetes

NAME, ADDRESS, PODS = "node2", "10.244.200.1", "10.244.200.0/24"  # the first node gives its pods the addresses from 10.244.0.2 on
TERMINATION = 240.0  # seconds that terminating pods may take: their drain timeout and grace period
_HERE, _THERE = "169.254.77.1", "169.254.77.2"
# If the link is gone, packets to this node vanish, as they do when a machine loses power. Otherwise senders would get an error at once.
_LINK = f"""
set -eu
ip link add to-{NAME} type veth peer name to-node1 netns "$1"
ip address add {_HERE}/30 dev to-{NAME}
ip link set to-{NAME} up
ip route add {PODS} via {_THERE} dev to-{NAME} metric 1
ip route replace blackhole {PODS} metric 1000
"""
_LINK_THERE = f"""
set -eu
ip address add {_THERE}/30 dev to-node1
ip link set to-node1 up
ip route add {components.POD_RANGE} via {_HERE} dev to-node1 src {ADDRESS}
"""


class SecondNode:
    """`start` adds the node, `lose` ends it as a power failure does, and `remove` also removes what it leaves."""

    def __init__(self, kubernetes: LocalKubernetes) -> None:
        self._kubernetes = kubernetes
        self._machine = kubernetes.second_machine()
        self._store = kubernetes.images.with_name(f"{kubernetes.images.name}-{NAME}")

    def start(self) -> None:
        """Start the node and wait until it is Ready. Raises ComponentFailed."""
        self.remove()
        with progress.step(f"start {NAME}"):
            self._copy_store()
            layout = self._write_configuration()
            self._machine.start(layout.binaries["pause"], ADDRESS, components.SERVICE_RANGE)
            _run([*self._kubernetes.machine.inside(), "sh", "-c", _LINK, "sh", str(self._machine.pid)])
            _run([*self._machine.inside(), "sh", "-c", _LINK_THERE])
            commands = components.commands(layout)
            environment = {"PATH": packages.SEARCH_PATH, "HOME": str(self._machine.run)}
            self._machine.spawn("containerd", commands["containerd"], environment)
            self._wait("containerd", lambda: self._ctr("version") != "")
            if leftovers := self._ctr("containers", "ls", "-q").split():  # of the first node; containerd reads its list when it starts
                self._ctr("containers", "rm", *leftovers)
                self._machine.kill("containerd")
                self._machine.spawn("containerd", commands["containerd"], environment)
                self._wait("containerd", lambda: self._ctr("version") != "")
            self._machine.spawn("kubelet", commands["kubelet"], environment)
            self._machine.spawn("kube-proxy", commands["kube-proxy"], environment)
            ready = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].status}"
            self._wait("kubelet", lambda: self._kubectl("get", "node", NAME, ready) == "True")

    def lose(self) -> None:
        """End every process of the node at once."""
        self._machine.stop()

    def remove(self) -> None:
        """End the node and remove its files, its route and its Node. Does nothing if there is none."""
        self._machine.stop()
        shutil.rmtree(self._store, ignore_errors=True)
        subprocess.run([*self._kubernetes.machine.inside(), "ip", "route", "del", "blackhole", PODS], capture_output=True)
        self._kubectl("delete", "node", NAME, "--ignore-not-found")

    def _copy_store(self) -> None:
        """Link the first node's files while its containerd is stopped. Pods still change files of their own, so it is tried twice."""
        terminating = "-o=jsonpath=pods:{.items[*].metadata.deletionTimestamp}"
        deadline = time.monotonic() + TERMINATION
        while self._kubectl("get", "pods", "-A", terminating) != "pods:":  # the kubelet would remove their containers during the copy
            if time.monotonic() > deadline:
                raise ComponentFailed(f"{NAME} cannot be started: pods of the first node still terminate after {TERMINATION:.0f} s")
            time.sleep(0.5)
        with self._kubernetes.without_components("containerd"):
            try:
                _link_files(self._kubernetes.images, self._store)
            except (ComponentFailed, OSError):
                shutil.rmtree(self._store, ignore_errors=True)
                _link_files(self._kubernetes.images, self._store)

    def _write_configuration(self) -> components.Layout:
        first, run = self._kubernetes.layout(), self._machine.run
        layout = replace(first, run=run, store=self._store, cgroup=self._machine.cgroup, node=NAME, address=ADDRESS, pods=PODS)
        subjects = {"kubelet": f"/O=system:nodes/CN=system:node:{NAME}", "kube-proxy": certificates.CLIENTS["kube-proxy"]}
        for name, subject in subjects.items():
            certificates.write_client(layout.certificates, first.certificates, name, subject, components.API_SERVER)
        components.write_configuration(layout)
        return layout

    def _wait(self, component: str, condition: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._machine.exit_code(component) is not None or time.monotonic() > deadline:
                raise ComponentFailed(f"{component} of {NAME} is not ready. Its last lines:\n{self._machine.tail(component)}")
            time.sleep(0.1)

    def _kubectl(self, *arguments: str) -> str:
        return self._output([*self._kubernetes.machine.inside(), "kubectl", *arguments])

    def _ctr(self, *arguments: str) -> str:
        socket = self._machine.run / "containerd.sock"
        return self._output(["ctr", f"--address={socket}", "--connect-timeout=2s", "--namespace=k8s.io", *arguments])

    def _output(self, command: list[str]) -> str:
        """Return what a command prints; empty if it failed."""
        done = subprocess.run(command, env=self._kubernetes.environment, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""


def _link_files(source: Path, target: Path) -> None:
    """Copy containerd's store with hard links. Its databases change in place, so they are copied; running containers are left out."""
    _run(["cp", "-al", str(source), str(target)])
    for database in target.rglob("*.db"):
        data = database.read_bytes()
        database.unlink()
        database.write_bytes(data)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ComponentFailed(f"{NAME} cannot be started: `{' '.join(command[:8])} …` failed:\n{done.stderr}")
