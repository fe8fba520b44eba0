"""The operator is killed with -9 during each of its actions. Its successor completes the action, and workers keep serving."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.availability import Availability
from e2e.service import Load, Service
from e2e.system import System, eventually


@pytest.fixture(scope="module")
def operators(installed: System) -> Iterator["Operators"]:
    """Two replicas, so that the standby takes over. The kubelet restarts the killed container."""
    if not installed.cluster.reaches_pods:
        pytest.skip("the operator's process runs on another machine, so it cannot be killed with -9")
    installed.install(operator={"replicas": 2})
    operators = Operators(installed)
    eventually(lambda: len(operators.processes()) == 2, 120, "two operators")
    yield operators
    installed.install()


class Operators:
    """The operator's processes on this machine, and the leader among them."""

    def __init__(self, system: System) -> None:
        self._system = system

    def pods(self) -> list[dict[str, Any]]:
        return list(self._system.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=self._system.namespace)["items"])

    def processes(self) -> dict[str, int]:
        """Return pod name → process id of each operator, found by the control groups of its pods."""
        groups = {pod["metadata"]["uid"].replace("-", "_"): pod["metadata"]["name"] for pod in self.pods()}
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                group, command = (process / "cgroup").read_text().replace("-", "_"), (process / "cmdline").read_bytes()
            except OSError:
                continue
            name = next((name for uid, name in groups.items() if uid in group), None)
            if name and b"fairlead-operator" in command:
                found[name] = int(process.name)
        return found

    def kill_the_leader(self) -> None:
        """Kill the leader once there is one (the lease of a killed leader must expire first), and delete its pod.

        The kubelet would restart a container that is killed often with growing delays.
        """
        pod, process = eventually(self._leader, 60, "a running leader")
        os.kill(process, signal.SIGKILL)
        self._system.cluster.kubectl("delete", "pod", pod, "-n", self._system.namespace, "--grace-period=0", "--force")

    def _leader(self) -> tuple[str, int] | None:
        """Return pod and process id of the lease's holder."""
        lease = self._system.get("lease", "fairlead-operator", namespace=self._system.namespace)
        holder = str(lease["spec"].get("holderIdentity", ""))
        return next(((name, pid) for name, pid in self.processes().items() if name in holder), None)


def kill_during(operators: Operators, action: Callable[[], Any], seconds: float) -> None:
    """Start the action, and kill the leading operator after `seconds`."""
    action()
    time.sleep(seconds)
    operators.kill_the_leader()


@pytest.fixture(scope="module")
def service(operators: Operators, installed: System) -> Iterator[Service]:
    """A service whose operator is killed while it creates the children."""
    service = Service(installed, "tenacious")
    kill_during(operators, lambda: installed.apply(service.manifest(replicas=2)), 0.15)
    service.wait_ready(replicas=2, seconds=300)
    yield service
    service.delete()


@pytest.mark.parametrize(
    ("strategy", "seconds", "available"), [("Surge", 0.1, 2), ("Surge", 4.0, 2), ("DrainFirst", 1.0, 1), ("Auto", 2.0, 2)]
)
def test_a_rollout_survives_operator_kills(service: Service, operators: Operators, strategy: str, seconds: float, available: int) -> None:
    before = {pod["metadata"]["uid"] for pod in service.pods()}
    spec = {"replicas": 2, "rollout": {"strategy": strategy}, "engine": {"maxNumSeqs": 32 + int(10 * seconds) + len(strategy)}}
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        kill_during(operators, lambda: service.system.apply(service.manifest(**spec)), seconds)
        eventually(lambda: not before & {pod["metadata"]["uid"] for pod in service.pods()}, 180, "only pods of the new revision")
        service.wait_ready(replicas=2)
    assert load.outcome["failed"] == 0, load.outcome["failures"]
    assert seen.fewest is not None and seen.fewest >= available


def test_scaling_survives_operator_kills(service: Service, operators: Operators) -> None:
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        kill_during(operators, lambda: service.scale(3), 0.1)
        service.wait_ready(replicas=3)
        kill_during(operators, lambda: service.scale(2), 0.1)
        service.wait_ready(replicas=2)
    assert load.outcome["failed"] == 0, load.outcome["failures"]
    assert seen.fewest == 2


def test_a_deletion_needs_no_operator(service: Service, operators: Operators) -> None:
    operators.kill_the_leader()
    service.delete()  # within a minute, without an operator
    kinds, selector = "deployments,replicasets,pods,services,poddisruptionbudgets", f"app.kubernetes.io/instance={service.name}"
    eventually(lambda: not service.system.get(kinds, "-l", selector)["items"], 120, "no child left")
