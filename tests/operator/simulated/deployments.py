"""The Deployment and ReplicaSet controllers, by the arithmetic of Kubernetes 1.36 (pkg/controller/deployment/{rolling,sync,progress}.go,
util/deployment_util.go, pkg/controller/replicaset): which ReplicaSet is scaled, by how much, and in which order.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.operator.simulated.api import Api, Body


@dataclass(eq=False)
class ReplicaSet:
    """`replicas` is the spec; the other counts are its status, as of its controller's last look."""

    deployment: str
    template: Body
    number: int  # order of creation
    replicas: int = 0
    desired: int = 0  # annotations of the Deployment controller
    most: int = 0
    total: int = 0
    ready: int = 0
    available: int = 0
    names: list[str] = field(default_factory=list)  # of all pods that it ever made


@dataclass(eq=False)
class Controller:
    """All Deployments of one API. `rolled(deployment, new, before)` hears of every step of a rolling update, with the sizes before it."""

    api: Api
    make_pod: Callable[[ReplicaSet], None]
    end_pod: Callable[[Body], None]
    rolled: Callable[[Body, list[ReplicaSet], dict[ReplicaSet, int]], None] = lambda deployment, sets, before: None
    sets: list[ReplicaSet] = field(default_factory=list)
    _made: int = 0

    def sync(self, name: str) -> None:
        """One look at one Deployment: at most one step."""
        deployment = self.api.objects.get(("Deployment", name))
        if deployment is None:
            return
        old, new = self._split(deployment)
        wanted, (surge, unavailable) = deployment["spec"]["replicas"], _bounds(deployment)
        active = [one for one in [*old, *([new] if new else [])] if one.replicas > 0]
        if deployment["spec"]["strategy"].get("type") == "Recreate":
            new = self._recreate(deployment, old, new, wanted)
        elif deployment["spec"].get("paused") or any(one.desired != wanted for one in active):
            self._scale(deployment, old, new, wanted, surge)
        else:
            new = self._roll(deployment, old, new, wanted, surge, unavailable)
        self._write_status(deployment, [*old, *([new] if new else [])], new)

    def sync_sets(self, name: str) -> None:
        """The ReplicaSet controller: make or end pods, then count them."""
        for one in [one for one in self.sets if one.deployment == name]:
            pods = self.pods_of(one)
            for _ in range(one.replicas - len(pods)):
                self.make_pod(one)
            for pod in sorted(pods, key=self._rank)[: max(0, len(pods) - one.replicas)]:
                self.end_pod(pod)
            pods = self.pods_of(one)
            settle = self.api.objects[("Deployment", name)]["spec"].get("minReadySeconds", 0)
            one.total, one.ready = len(pods), sum(ready_since(pod) is not None for pod in pods)
            one.available = sum(available(pod, settle, self.api.now) for pod in pods)

    def forget(self, name: str) -> None:
        """The Deployment is gone: the garbage collector ends its pods."""
        for one in [one for one in self.sets if one.deployment == name]:
            for pod in self.pods_of(one):
                self.end_pod(pod)
            self.sets.remove(one)

    def pods_of(self, one: ReplicaSet) -> list[Body]:
        found = [pod for name in one.names if (pod := self.api.objects.get(("Pod", name))) is not None]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def _rank(self, pod: Body) -> Any:
        """Those that are ended first, first: without a node, not ready, made last."""
        return (pod["sim"].node is not None, ready_since(pod) is not None, -pod["sim"].order)

    def _split(self, deployment: Body) -> tuple[list[ReplicaSet], ReplicaSet | None]:
        mine = [one for one in self.sets if one.deployment == deployment["metadata"]["name"]]
        new = next((one for one in mine if one.template == deployment["spec"]["template"]), None)
        return [one for one in mine if one is not new], new

    def _resize(self, one: ReplicaSet, replicas: int, wanted: int, surge: int) -> None:
        one.replicas, one.desired, one.most = replicas, wanted, wanted + surge

    def _roll(
        self, deployment: Body, old: list[ReplicaSet], new: ReplicaSet | None, wanted: int, surge: int, unavailable: int
    ) -> ReplicaSet:
        if new is None:
            self._made += 1
            new = ReplicaSet(deployment["metadata"]["name"], copy.deepcopy(deployment["spec"]["template"]), self._made)
            self.sets.append(new)
            self._resize(new, _grown(new, [*old, new], wanted, surge), wanted, surge)
            annotations = deployment["metadata"].setdefault("annotations", {})
            annotations["deployment.kubernetes.io/revision"] = str(self._made)
            self.api.put(deployment)
        before = {one: one.replicas for one in [*old, new]}
        if new.replicas != wanted:
            grown = wanted if new.replicas > wanted else _grown(new, [*old, new], wanted, surge)
            if grown != new.replicas:
                self._resize(new, grown, wanted, surge)
                self.rolled(deployment, [*old, new], before)
                return new
        self._shrink(sorted(old, key=lambda one: one.number), new, wanted, surge, unavailable)
        if before != {one: one.replicas for one in [*old, new]}:
            self.rolled(deployment, [*old, new], before)
        return new

    def _recreate(self, deployment: Body, old: list[ReplicaSet], new: ReplicaSet | None, wanted: int) -> ReplicaSet | None:
        """pkg/controller/deployment/recreate.go: all old pods have gone before the first new one is made."""
        for one in old:
            self._resize(one, 0, wanted, 0)
        if any(pod["sim"].set in old for pod in self.api.of("Pod")):
            return new
        if new is None:
            self._made += 1
            new = ReplicaSet(deployment["metadata"]["name"], copy.deepcopy(deployment["spec"]["template"]), self._made)
            self.sets.append(new)
        self._resize(new, wanted, wanted, 0)
        return new

    def _shrink(self, old: list[ReplicaSet], new: ReplicaSet, wanted: int, surge: int, unavailable: int) -> None:
        everything, least = [*old, new], wanted - unavailable
        room = sum(one.replicas for one in everything) - least - (new.replicas - new.available)
        if room <= 0 or not any(one.replicas for one in old):
            return
        cleaned = 0
        for one in old:
            away = min(room - cleaned, one.replicas - one.available)
            if one.replicas and away > 0 and cleaned < room:
                self._resize(one, one.replicas - away, wanted, surge)
                cleaned += away
        excess = sum(one.available for one in everything) - least
        for one in old:
            away = min(one.replicas, excess)
            if away > 0:
                self._resize(one, one.replicas - away, wanted, surge)
                excess -= away

    def _scale(self, deployment: Body, old: list[ReplicaSet], new: ReplicaSet | None, wanted: int, surge: int) -> None:
        everything = [*old, *([new] if new else [])]
        active = [one for one in everything if one.replicas > 0]
        if len(active) <= 1:
            latest = active[0] if active else new or max(old, key=lambda one: one.number, default=None)
            if latest is not None and latest.replicas != wanted:
                self._resize(latest, wanted, wanted, surge)
            return
        if new is not None and new.replicas == new.desired == new.available == wanted:
            for one in old:
                self._resize(one, 0, wanted, surge)
            return
        allowed = wanted + surge if wanted else 0
        change, done = allowed - sum(one.replicas for one in active), 0
        active.sort(key=lambda one: (-one.replicas, -one.number if change > 0 else one.number))
        sizes = {}
        for one in active:
            part = 0
            if change not in (0, done):
                fraction = -one.replicas if not wanted else _round(one.replicas * allowed / one.most) - one.replicas
                part = min(fraction, change - done) if change > 0 else max(fraction, change - done)
            sizes[one] = one.replicas + part
            done += part
        sizes[active[0]] = max(0, sizes[active[0]] + change - done)
        for one, size in sizes.items():
            self._resize(one, size, wanted, surge)

    def _write_status(self, deployment: Body, sets: list[ReplicaSet], new: ReplicaSet | None) -> None:
        before = deployment.get("status") or {}
        status = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": sum(one.total for one in sets),
            "updatedReplicas": new.total if new else 0,
            "readyReplicas": sum(one.ready for one in sets),
            "availableReplicas": sum(one.available for one in sets),
        }
        status["conditions"] = [
            self._progress(deployment, before, status),
            self._availability(before, status, deployment["spec"]["replicas"]),
        ]
        if status != before:
            deployment["status"] = status
            self.api.put(deployment)

    def _availability(self, before: Body, now: Body, wanted: int) -> Body:
        truth = "True" if now["availableReplicas"] >= wanted else "False"
        held: Body = next((one for one in before.get("conditions") or [] if one["type"] == "Available"), {})
        return held if held.get("status") == truth else {"type": "Available", "status": truth, "lastTransitionTime": self.api.time()}

    def _progress(self, deployment: Body, before: Body, now: Body) -> Body:
        held: Body = next(iter(before.get("conditions") or []), {})
        wanted, clock = deployment["spec"]["replicas"], self.api.now

        def say(status: str, reason: str, message: str = "") -> Body:
            return {"type": "Progressing", "status": status, "reason": reason, "message": message, "at": clock}

        if deployment["spec"].get("paused"):
            keep = held.get("reason") in ("DeploymentPaused", "ProgressDeadlineExceeded")
            return held if keep else say("Unknown", "DeploymentPaused")
        if held.get("reason") == "DeploymentPaused":
            return say("Unknown", "DeploymentResumed")
        if held.get("reason") == "NewReplicaSetAvailable" and now["replicas"] == now["updatedReplicas"]:
            return held
        if now["updatedReplicas"] == now["replicas"] == now["availableReplicas"] == wanted:
            return held if held.get("reason") == "NewReplicaSetAvailable" else say("True", "NewReplicaSetAvailable")
        old_before = before.get("replicas", 0) - before.get("updatedReplicas", 0)
        progress = any(now[name] > before.get(name, 0) for name in ("updatedReplicas", "readyReplicas", "availableReplicas"))
        if not held or progress or now["replicas"] - now["updatedReplicas"] < old_before:
            return say("True", "ReplicaSetUpdated")
        late = held["reason"] == "NewReplicaSetAvailable"  # a new rollout: its clock starts with the first thing it does
        if held["reason"] == "ProgressDeadlineExceeded" or late or clock < held["at"] + deployment["spec"]["progressDeadlineSeconds"]:
            return held
        return say("False", "ProgressDeadlineExceeded", "ReplicaSet has timed out progressing.")


def _bounds(deployment: Body) -> tuple[int, int]:
    if "rollingUpdate" not in deployment["spec"]["strategy"]:
        return 0, deployment["spec"]["replicas"]
    update = deployment["spec"]["strategy"]["rollingUpdate"]
    return update["maxSurge"], min(update["maxUnavailable"], deployment["spec"]["replicas"])


def _grown(new: ReplicaSet, everything: list[ReplicaSet], wanted: int, surge: int) -> int:
    return new.replicas + max(0, min(wanted + surge - sum(one.replicas for one in everything), wanted - new.replicas))


def _round(value: float) -> int:
    """math.Round of Go: halves away from zero."""
    return math.floor(value + 0.5)


def ready_since(pod: Body) -> float | None:
    """When the pod became ready; None for one that is not."""
    since: float | None = pod["sim"].ready
    return since


def available(pod: Body, settle: float, now: float) -> bool:
    since = ready_since(pod)
    return since is not None and since + settle <= now
