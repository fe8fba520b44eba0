"""Faults of a running service. Each returns how to see that it has happened: a status that is read too early is from before it."""

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from e2e.availability import is_ready
from e2e.cluster.cluster import LocalCluster
from e2e.service import Service
from e2e.system import System
from e2e.test_credentials import OWN_SECRET, Redis
from e2e.test_faults import KILL_WORKER

Check = Callable[[], bool]
Fault = Callable[["Faults"], Check]
REPLICAS = 2


@dataclass
class Faults:
    """The service, and what each fault does to it or to what is below it. `killed`: the pods whose open streams may have failed."""

    service: Service
    random: random.Random
    seats: int = 32
    killed: set[str] = field(default_factory=set)

    @property
    def system(self) -> System:
        return self.service.system

    def spec(self, replicas: int = REPLICAS) -> dict[str, object]:
        """Return the manifest. A worker's process can be killed from inside its pod."""
        shared = {"spec": {"shareProcessNamespace": True}}
        return self.service.manifest(replicas=replicas, engine={"maxNumSeqs": self.seats}, podTemplate=shared)

    def kill_worker(self) -> Check:
        """`kill -9` of a worker's process."""
        pod = self._choose("worker")
        self.killed.add(pod)

        def restarts() -> int:
            return int(self.system.get("pod", pod)["status"]["containerStatuses"][0]["restartCount"])

        before = restarts()
        # The killed container may take the command with it, so its exit code says nothing.
        self.system.cluster.kubectl("exec", "-n", self.system.models, pod, "--", "python", "-c", KILL_WORKER, check=False)
        return lambda: restarts() > before

    def delete_worker(self) -> Check:
        """A worker's pod deleted: its streams end before it does."""
        return self._delete("worker")

    def evict_worker(self) -> Check:
        """A worker's pod evicted, as by `kubectl drain`."""
        pod, namespace = self._choose("worker"), self.system.models
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        self.system.cluster.kubectl("create", "--raw", path, "-f", "-", input=json.dumps(body))
        return lambda: self._is_gone(pod)

    def roll_out(self) -> Check:
        """A new revision of the workers."""
        self.seats += 1
        self.system.apply(self.spec())
        wanted = f"--max-num-seqs={self.seats}"
        return lambda: any(wanted in pod["spec"]["containers"][0]["args"] for pod in self.service.pods())

    def scale(self) -> Check:
        """One worker more, and one less again."""
        self.service.scale(REPLICAS + 1)
        self.service.wait_ready(replicas=REPLICAS + 1)
        self.service.scale(REPLICAS)
        return lambda: len(self.service.pods()) == REPLICAS

    def rotate_credentials(self) -> Check:
        """New passwords of Redis. If the last rotation has not ended, the operator does this one later."""
        redis, value = Redis(self.system), f"fairlead.dev/rotate={time.time():.0f}"
        before = redis.own_secret()
        self.system.cluster.kubectl("annotate", "--overwrite", "secret", OWN_SECRET, value, "-n", self.system.namespace)
        return lambda: bool(before["previous-key"]) or redis.own_secret() != before

    def restart_api_server(self) -> Check:
        """The API server killed and started."""
        return self._restart("kube-apiserver")

    def restart_etcd(self) -> Check:
        """etcd killed and started."""
        return self._restart("etcd")

    def delete_router(self) -> Check:
        """A router's pod deleted."""
        return self._delete("router")

    def kill_operator(self) -> Check:
        """The operator's pod deleted without a grace period."""
        return self._kill("operator")

    def kill_redis(self) -> Check:
        """Redis' pod deleted without a grace period: the index is empty afterwards."""
        return self._kill("redis")

    def _delete(self, component: str) -> Check:
        pod = self._choose(component)
        self.system.cluster.kubectl("delete", "pod", pod, "-n", self.system.models, "--wait=false")
        return lambda: self._is_gone(pod)

    def _is_gone(self, pod: str) -> bool:
        found = ["get", "pod", pod, "-n", self.system.models, "--ignore-not-found", "-o", "name"]
        return not self.system.cluster.kubectl(*found).stdout

    def _kill(self, component: str) -> Check:
        """The check waits for the next pod: meanwhile no operator may run that would change the service's status."""
        label, namespace = f"app.kubernetes.io/component={component}", self.system.namespace

        def ready() -> set[str]:
            pods = self.system.get("pods", "-l", label, namespace=namespace)["items"]
            return {pod["metadata"]["uid"] for pod in pods if is_ready(pod)}

        before = ready()
        self.system.cluster.kubectl("delete", "pod", "-l", label, "-n", namespace, "--grace-period=0", "--force")
        return lambda: bool(ready() - before)

    def _restart(self, component: str) -> Check:
        """The API server answers again afterwards, so there is nothing to wait for."""
        assert isinstance(self.system.cluster, LocalCluster)
        with self.system.cluster.kubernetes.without_components(component):
            pass
        return lambda: True

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
