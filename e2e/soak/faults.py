"""Faults of a running service. Each returns the pods whose open streams it may end."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from e2e.cluster.cluster import LocalCluster
from e2e.service import Service
from e2e.system import System
from e2e.test_credentials import OWN_SECRET
from e2e.test_faults import KILL_WORKER

Fault = Callable[["Faults"], set[str]]
REPLICAS = 2


@dataclass
class Faults:
    """The service, and what each fault does to it or to what is below it."""

    service: Service
    random: random.Random
    seats: int = 32

    @property
    def system(self) -> System:
        return self.service.system

    def spec(self, replicas: int = REPLICAS) -> dict[str, object]:
        """Return the manifest. A worker's process can be killed from inside its pod."""
        shared = {"spec": {"shareProcessNamespace": True}}
        return self.service.manifest(replicas=replicas, engine={"maxNumSeqs": self.seats}, podTemplate=shared)

    def kill_worker(self) -> set[str]:
        """`kill -9` of a worker's process."""
        pod = self._choose("worker")
        self.system.cluster.kubectl("exec", "-n", self.system.models, pod, "--", "python", "-c", KILL_WORKER)
        return {pod}

    def delete_worker(self) -> set[str]:
        """A worker's pod deleted: its streams end before it does."""
        self.system.cluster.kubectl("delete", "pod", self._choose("worker"), "-n", self.system.models, "--wait=false")
        return set()

    def evict_worker(self) -> set[str]:
        """A worker's pod evicted, as by `kubectl drain`."""
        pod, namespace = self._choose("worker"), self.system.models
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.system.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))
        return set()

    def roll_out(self) -> set[str]:
        """A new revision of the workers."""
        self.seats += 1
        self.system.apply(self.spec())
        return set()

    def scale(self) -> set[str]:
        """One worker more, and one less again."""
        self.service.scale(REPLICAS + 1)
        self.service.wait_ready(replicas=REPLICAS + 1)
        self.service.scale(REPLICAS)
        return set()

    def rotate_credentials(self) -> set[str]:
        """New passwords of Redis."""
        value = f"fairlead.dev/rotate={time.time():.0f}"
        self.system.cluster.kubectl("annotate", "--overwrite", "secret", OWN_SECRET, value, "-n", self.system.namespace)
        return set()

    def restart_api_server(self) -> set[str]:
        """The API server killed and started."""
        return self._restart("kube-apiserver")

    def restart_etcd(self) -> set[str]:
        """etcd killed and started."""
        return self._restart("etcd")

    def delete_router(self) -> set[str]:
        """A router's pod deleted."""
        self.system.cluster.kubectl("delete", "pod", self._choose("router"), "-n", self.system.models, "--wait=false")
        return set()

    def kill_operator(self) -> set[str]:
        """The operator's pod deleted without a grace period."""
        return self._kill("operator")

    def kill_redis(self) -> set[str]:
        """Redis' pod deleted without a grace period: the index is empty afterwards."""
        return self._kill("redis")

    def _kill(self, component: str) -> set[str]:
        label = f"app.kubernetes.io/component={component}"
        self.system.cluster.kubectl("delete", "pod", "-l", label, "-n", self.system.namespace, "--grace-period=0", "--force")
        return set()

    def _restart(self, component: str) -> set[str]:
        assert isinstance(self.system.cluster, LocalCluster)
        self.system.cluster.kubernetes.stop_components(component)
        self.system.cluster.kubernetes.start_components(component)
        return set()

    def _choose(self, component: str) -> str:
        return str(self.random.choice(self.service.pods(component))["metadata"]["name"])


OF_MEASURED: tuple[Fault, ...] = (Faults.kill_operator, Faults.delete_router, Faults.kill_redis)
OF_OTHERS: tuple[Fault, ...] = (
    Faults.kill_worker,
    Faults.delete_worker,
    Faults.evict_worker,
    Faults.roll_out,
    Faults.scale,
    Faults.rotate_credentials,
)
OF_CONTROL_PLANE: tuple[Fault, ...] = (Faults.restart_api_server, Faults.restart_etcd)


def plan(minutes: int, others: tuple[Fault, ...], chosen: random.Random) -> list[Fault]:
    """Return the fault of each minute, each kind about equally often.

    Faults of the processes whose memory is measured come in the first third: their memory is measured over the rest.
    """
    first = round(minutes / 3)
    return [*_draw(OF_MEASURED, first, chosen), *_draw(others, minutes - first, chosen)]


def _draw(kinds: tuple[Fault, ...], count: int, chosen: random.Random) -> list[Fault]:
    drawn: list[Fault] = []
    while len(drawn) < count:
        drawn += chosen.sample(kinds, len(kinds))
    return drawn[:count]
