"""Nodes with GPUs, the scheduler that fills them, and the kubelets on them."""

import random
from dataclasses import dataclass, field

from tests.operator.simulated.api import Api, Body
from tests.operator.simulated.deployments import ReplicaSet

BACKOFF = 10.0  # seconds at most until kube-scheduler tries a pod again, after something has changed
BAD_IMAGE = ":bad"  # images whose containers crash
CRASHED = {"exitCode": 1, "reason": "Error", "message": "ValueError: no such model"}


@dataclass(eq=False)
class Pod:
    """What the API does not show of a pod, or shows too slowly to compute with. Times in seconds since the epoch."""

    set: ReplicaSet
    order: int
    gpus: int
    broken: bool  # never becomes ready
    made: float
    node: int | None = None
    loaded: float = 0.0
    ready: float | None = None
    try_at: float = 0.0
    gone_at: float = 0.0


@dataclass(eq=False)
class Nodes:
    """`capacity[node]` GPUs; `loading` and `draining` are the longest that a pod takes for either."""

    api: Api
    chance: random.Random
    capacity: list[int]
    loading: float = 20.0
    draining: float = 60.0
    _order: int = 0
    ended: list[tuple[float, str]] = field(default_factory=list)  # when a pod was told to go: time, name

    def make_pod(self, owner: ReplicaSet) -> None:
        self._order += 1
        labels = dict(owner.template["metadata"]["labels"])
        (container,) = owner.template["spec"]["containers"]
        gpus = int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        broken = "--broken" in container["args"] or container["image"].endswith(BAD_IMAGE)
        sim = Pod(owner, self._order, gpus, broken, self.api.now)
        name = f"{owner.deployment}-{self._order}"
        owner.names.append(name)
        self.api.put(
            {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name, "labels": labels}, "status": {"phase": "Pending"}, "sim": sim}
        )

    def end_pod(self, pod: Body) -> None:
        """Delete a pod: at once without a node, after its streams with one."""
        sim: Pod = pod["sim"]
        name = pod["metadata"]["name"]
        self.ended.append((self.api.now, name))
        if sim.node is None:
            self.api.remove(("Pod", name))
            return
        sim.gone_at = self.api.now + (self.chance.uniform(0, self.draining) if sim.ready is not None else 1.0)
        pod["metadata"]["deletionTimestamp"] = _time(self.api, self.draining + 15)
        self.api.put(pod)

    def free(self, node: int) -> int:
        return self.capacity[node] - sum(pod["sim"].gpus for pod in self.api.of("Pod") if pod["sim"].node == node)

    def room_for(self, gpus: int, *, after_departures: bool) -> bool:
        """Is there a node for one more pod? `after_departures`: once the terminating pods have ended?"""
        for node in range(len(self.capacity)):
            pods = [pod for pod in self.api.of("Pod") if pod["sim"].node == node]
            held = sum(pod["sim"].gpus for pod in pods if not (after_departures and "deletionTimestamp" in pod["metadata"]))
            if self.capacity[node] - held >= gpus:
                return True
        return False

    def step(self) -> None:
        for pod in sorted(self.api.of("Pod"), key=lambda pod: pod["sim"].order):
            sim: Pod = pod["sim"]
            if "deletionTimestamp" in pod["metadata"]:
                if self.api.now >= sim.gone_at:
                    self.api.remove(("Pod", pod["metadata"]["name"]))
            elif sim.node is None:
                self._schedule(pod, sim)
            elif sim.ready is None and self.api.now >= sim.loaded:
                self._start(pod, sim)

    def fail(self, pod: Body) -> None:
        """Its container has ended by itself; it is started again in its place."""
        sim: Pod = pod["sim"]
        sim.ready, sim.loaded = None, self.api.now + self.chance.uniform(1, self.loading)
        self._say(pod, "Running", Ready="False")

    def _schedule(self, pod: Body, sim: Pod) -> None:
        if self.api.now < sim.try_at:
            return
        node = next((node for node in range(len(self.capacity)) if self.free(node) >= sim.gpus), None)
        if node is not None:
            sim.node, sim.loaded = node, self.api.now + self.chance.uniform(1, self.loading)
            self._say(pod, "Running", PodScheduled="True")
            return
        sim.try_at = self.api.now + self.chance.uniform(0, BACKOFF)
        if not pod["status"].get("conditions"):
            self._say(pod, "Pending", PodScheduled="False")

    def _start(self, pod: Body, sim: Pod) -> None:
        if not sim.broken:
            sim.ready = self.api.now
            self._say(pod, "Running", PodScheduled="True", Ready="True")
        elif "containerStatuses" not in pod["status"]:
            self._say(pod, "Running", PodScheduled="True", Ready="False")
            waiting = {"reason": "CrashLoopBackOff", "message": "back-off"}
            state = {"name": "worker", "restartCount": 3, "state": {"waiting": waiting}, "lastState": {"terminated": CRASHED}}
            pod["status"]["containerStatuses"] = [state]
            self.api.put(pod)

    def _say(self, pod: Body, phase: str, **conditions: str) -> None:
        since = {one["type"]: one for one in pod["status"].get("conditions", [])}
        made = []
        for type_, status in conditions.items():
            held = since.get(type_)
            at = held["lastTransitionTime"] if held is not None and held["status"] == status else self.api.time()
            one = {"type": type_, "status": status, "lastTransitionTime": at}
            if type_ == "PodScheduled" and status == "False":
                count = len(self.capacity)
                one |= {"reason": "Unschedulable", "message": f"0/{count} nodes are available: {count} Insufficient nvidia.com/gpu."}
            made.append(one)
        pod["status"] = {"phase": phase, "conditions": made}
        self.api.put(pod)


def _time(api: Api, later: float) -> str:
    now, api.now = api.now, api.now + later
    text = api.time()
    api.now = now
    return text
