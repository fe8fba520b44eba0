"""The operator is killed with -9 in the middle of everything it does, and started anew: what was begun ends, and workers stay."""

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
        pytest.skip("the operator's process can be killed with -9 only where this machine runs it")
    installed.install(operator={"replicas": 2})
    operators = Operators(installed)
    eventually(lambda: len(operators.processes()) == 2, 120, "two operators")
    yield operators
    installed.install()


class Operators:
    """The operator's processes on this machine, and which of them acts."""

    def __init__(self, system: System) -> None:
        self._system = system

    def pods(self) -> list[dict[str, Any]]:
        return list(self._system.get("pods", "-l", "app.kubernetes.io/component=operator", namespace=self._system.namespace)["items"])

    def processes(self) -> dict[str, int]:
        """Pod name -> process id: of those in a control group of one of our pods, the one that is the operator."""
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
        """As soon as there is one: the lease of one just killed runs out first. And its pod with it: a container that was killed often is
        started later and later."""
        pod, process = eventually(self._leader, 60, "a leader that lives")
        os.kill(process, signal.SIGKILL)
        self._system.cluster.kubectl("delete", "pod", pod, "-n", self._system.namespace, "--grace-period=0", "--force")

    def _leader(self) -> tuple[str, int] | None:
        """Pod and process of the lease's holder."""
        lease = self._system.get("lease", "fairlead-operator", namespace=self._system.namespace)
        holder = str(lease["spec"].get("holderIdentity", ""))
        return next(((name, pid) for name, pid in self.processes().items() if name in holder), None)


def during(operators: Operators, action: Callable[[], Any], seconds: float) -> None:
    """Start the action, and kill the leading operator after `seconds`."""
    action()
    time.sleep(seconds)
    operators.kill_the_leader()


@pytest.fixture(scope="module")
def service(operators: Operators, installed: System) -> Iterator[Service]:
    """Made while the operator that makes it is killed."""
    service = Service(installed, "tenacious")
    during(operators, lambda: installed.apply(service.manifest(replicas=2)), 0.15)
    service.ready(replicas=2, seconds=300)
    yield service
    service.delete()


@pytest.mark.parametrize(
    ("strategy", "seconds", "available"), [("Surge", 0.1, 2), ("Surge", 4.0, 2), ("DrainFirst", 1.0, 1), ("Auto", 2.0, 2)]
)
def test_a_rollout_goes_on(service: Service, operators: Operators, strategy: str, seconds: float, available: int) -> None:
    before = {pod["metadata"]["uid"] for pod in service.pods()}
    spec = {"replicas": 2, "rollout": {"strategy": strategy}, "engine": {"maxNumSeqs": 32 + int(10 * seconds) + len(strategy)}}
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        during(operators, lambda: service.system.apply(service.manifest(**spec)), seconds)
        eventually(lambda: not before & {pod["metadata"]["uid"] for pod in service.pods()}, 180, "only pods of the new revision")
        service.ready(replicas=2)
    assert load.outcome["failed"] == 0, load.outcome["failures"]
    assert seen.fewest is not None and seen.fewest >= available


def test_scaling_goes_on(service: Service, operators: Operators) -> None:
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        during(operators, lambda: service.scale(3), 0.1)
        service.ready(replicas=3)
        during(operators, lambda: service.scale(2), 0.1)
        service.ready(replicas=2)
    assert load.outcome["failed"] == 0, load.outcome["failures"]
    assert seen.fewest == 2


def test_a_deletion_goes_on(service: Service, operators: Operators) -> None:
    operators.kill_the_leader()
    service.delete()  # within a minute, with no operator to help
    kinds, selector = "deployments,replicasets,pods,services,poddisruptionbudgets", f"app.kubernetes.io/instance={service.name}"
    eventually(lambda: not service.system.get(kinds, "-l", selector)["items"], 120, "no child left")
