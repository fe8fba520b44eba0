"""The operator is killed with -9 during each of its actions. Its successor completes the action, and workers keep serving."""

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.availability import Availability, is_ready
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


def kill_during(operators: Operators, action: Callable[[], Any], moment: Callable[[], Any], what: str) -> None:
    """Start the action, and kill the leading operator as soon as `moment` is true."""
    action()
    eventually(moment, 120, what)
    operators.kill_the_leader()


def find_deployment(service: Service, name: str) -> dict[str, Any]:
    """Return a Deployment of the service; empty: there is none."""
    found = service.system.get("deployments", "--field-selector", f"metadata.name={service.name}-{name}")["items"]
    return found[0] if found else {}


class Rollout:
    """The pods of a service from before an edit, and what has happened to them since. Each method is a moment to kill the operator at."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.before = {pod["metadata"]["uid"] for pod in service.pods()}

    def spec_is_written(self) -> bool:
        """At once: the operator may not have read it."""
        return True

    def new_pod_exists(self) -> bool:
        return any(pod["metadata"]["uid"] not in self.before for pod in self._service.pods())

    def new_pod_is_ready(self) -> bool:
        return any(pod["metadata"]["uid"] not in self.before and is_ready(pod) for pod in self._service.pods())

    def old_pod_is_leaving(self) -> bool:
        return len(self.before & {pod["metadata"]["uid"] for pod in self._service.pods()}) < len(self.before)

    def is_over(self) -> bool:
        return not self.before & {pod["metadata"]["uid"] for pod in self._service.pods()}


@pytest.fixture(scope="module")
def service(operators: Operators, installed: System) -> Iterator[Service]:
    """A service whose operator is killed while it creates the children."""
    service = Service(installed, "tenacious")
    first = partial(find_deployment, service, "worker")
    with service.deleted_afterwards():
        kill_during(operators, lambda: installed.apply(service.manifest(replicas=2)), first, "the first child")
        service.wait_ready(replicas=2, seconds=300)
        yield service


@pytest.mark.parametrize(
    ("strategy", "moment", "available"),
    [
        pytest.param("Surge", Rollout.spec_is_written, 2, marks=pytest.mark.long),
        pytest.param("Surge", Rollout.new_pod_is_ready, 2, marks=pytest.mark.long),
        pytest.param("DrainFirst", Rollout.old_pod_is_leaving, 1, marks=pytest.mark.long),
        ("Auto", Rollout.new_pod_exists, 2),
    ],
)
def test_a_rollout_survives_operator_kills(
    service: Service, operators: Operators, strategy: str, moment: Callable[[Rollout], bool], available: int
) -> None:
    rollout = Rollout(service)
    seats = 32 + len(strategy) + len(moment.__name__)  # another number, and so another revision, each time
    spec = {"replicas": 2, "rollout": {"strategy": strategy}, "engine": {"maxNumSeqs": seats}}
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        kill_during(operators, lambda: service.system.apply(service.manifest(**spec)), partial(moment, rollout), moment.__name__)
        assert not rollout.is_over(), "the operator was killed in the middle"
        eventually(rollout.is_over, 180, "only pods of the new revision")
        service.wait_ready(replicas=2)
    load.assert_answered()
    assert seen.fewest >= available


@pytest.mark.long
def test_scaling_survives_operator_kills(service: Service, operators: Operators) -> None:
    with Load(service, concurrency=2, max_tokens=64) as load, Availability(service) as seen:
        kill_during(operators, lambda: service.scale(3), lambda: find_deployment(service, "worker")["spec"]["replicas"] == 3, "3 replicas")
        service.wait_ready(replicas=3)
        kill_during(operators, lambda: service.scale(2), lambda: True, "the written spec")
        service.wait_ready(replicas=2)
    load.assert_answered()
    assert seen.fewest == 2


@pytest.mark.long
def test_a_deletion_needs_no_operator(service: Service, operators: Operators) -> None:
    operators.kill_the_leader()
    service.delete()  # within a minute, without an operator
    eventually(lambda: service.leftovers() == [], 120, "no child left")
