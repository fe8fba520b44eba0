"""Random histories of one service's pods, and its status after each change: the pure function on a small model of the controllers.

`World.tick` advances the clock. Each pod has a state, whose body is what a kubelet or scheduler would write. The counts of the Deployment
follow.
"""

import random
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from tests.operator.support.manifests import service as parse_service

from fairlead_operator.api import InferenceService, ServiceStatus
from fairlead_operator.api.status import Condition
from fairlead_operator.observed import Observed, ProbeResult
from fairlead_operator.revisions import router_revision, worker_revision
from fairlead_operator.rollout.step import DRAIN, SURGE
from fairlead_operator.rollout.strategy import next_step
from fairlead_operator.status.conditions import find
from fairlead_operator.status.service_status import StatusResult, build_service_status

START = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC).timestamp()
DEADLINE = 900  # spec.rollout.progressDeadlineSeconds
FAULTS = ("OOMKilled", "Crashed", "CrashLoopBackOff", "ImagePullBackOff", "FailedScheduling", "FailedMount")
SILENT = ("SchedulingGated", "Starting", "Loading")  # causes that are no fault, however long they last


@lru_cache(4096)
def rfc(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(eq=False)
class Pod:
    """`state`: the reason of its cause, or Ready. `since`: when the state began. `served`: it was ready since its container's start."""

    name: str
    component: str
    revision: str
    made: float
    state: str = "Starting"
    since: float = 0.0
    stuck: bool = False  # it stays in its state until it is mended

    def body(self) -> dict[str, Any]:
        since = rfc(self.since)
        labels = {
            "app.kubernetes.io/component": self.component,
            "app.kubernetes.io/instance": "qwen",
            "fairlead.dev/revision": self.revision,
        }
        metadata = {"name": self.name, "uid": self.name, "labels": labels, "creationTimestamp": rfc(self.made)}
        return {"kind": "Pod", "metadata": metadata, "status": {"podIP": "10.0.0.1", **self._status(since)}}

    def _status(self, since: str) -> dict[str, Any]:
        placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": rfc(self.made)}
        unready = {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "lastTransitionTime": since}

        def runs(
            state: dict[str, Any], last: dict[str, Any] | None = None, *, started: bool = False, ready: bool = False
        ) -> dict[str, Any]:
            one = {"name": self.component, "image": "x", "ready": ready, "started": started, "restartCount": 1, "state": state}
            conditions = [placed, {**unready, "status": "True", "reason": ""} if ready else unready]
            return {"phase": "Running", "conditions": conditions, "containerStatuses": [one | {"lastState": last or {}}]}

        match self.state:
            case "Ready":
                return runs({"running": {"startedAt": rfc(self.made)}}, started=True, ready=True)
            case "NotReady":
                return runs({"running": {"startedAt": rfc(self.made)}}, started=True)
            case "Loading":
                return runs({"running": {"startedAt": since}})
            case "OOMKilled":
                return runs({"running": {"startedAt": since}}, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
            case "Crashed" | "CrashLoopBackOff":
                return runs({"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"exitCode": 1, "message": "ValueError"}})
            case "ImagePullBackOff":
                return runs({"waiting": {"reason": "ErrImagePull", "message": "not found"}})
            case "FailedMount":
                return {
                    "phase": "Pending",
                    "conditions": [placed],
                    "containerStatuses": [
                        {"name": self.component, "state": {"waiting": {"reason": "CreateContainerConfigError", "message": "secret"}}}
                    ],
                }
            case "Evicted":
                target = {"type": "DisruptionTarget", "status": "True", "lastTransitionTime": since}
                return {"phase": "Failed", "reason": "Evicted", "message": "low on memory", "conditions": [placed, target]}
            case "FailedScheduling" | "SchedulingGated" as reason:
                told = "Unschedulable" if reason == "FailedScheduling" else reason
                message = "0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."
                lacks = {**placed, "status": "False", "reason": told, "message": message, "lastTransitionTime": since}
                return {"phase": "Pending", "conditions": [lacks]}
        return {
            "phase": "Pending",
            "conditions": [placed],
            "containerStatuses": [{"name": self.component, "ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}],
        }


@dataclass
class World:
    """One service, its pods, and the status that the operator wrote last."""

    chance: random.Random
    scaled_to_zero: bool = False  # spec.scaling.minReplicas is 0
    strategy: str = "Surge"
    now: float = START
    generation: int = 1
    desired: int = 2
    edits: int = 0
    pods: list[Pod] = field(default_factory=list)
    status: ServiceStatus = field(default_factory=ServiceStatus)
    probe: ProbeResult | None = None
    router_fails: bool = False  # completions fail although pods are ready
    result: StatusResult | None = None
    stepped_at: float = START  # when an edit or a change of the size last began a step
    served_at: float | None = None  # since when a worker and a router are ready
    short_at: float | None = None  # since when capacity is too small
    probed_at: float | None = None  # when a completion last succeeded
    made: int = 0
    start_seconds: float = 5.0  # until a loading pod is ready; its other states take a fifth of it
    changes: int = 0  # of any pod's state, of the spec, or of the outcome of completions
    _specs: dict[tuple[int, int, int], InferenceService] = field(default_factory=dict)
    _revisions: dict[tuple[int, int, int], dict[str, str]] = field(default_factory=dict)

    def service(self) -> InferenceService:
        """Return the service as the reconciler reads it, with the status that was written."""
        return replace(self._spec(), status=self.status)

    def _spec(self) -> InferenceService:
        scaling = {"minReplicas": 0, "maxReplicas": 9, "target": {"ttftMilliseconds": 2000}}
        spec: dict[str, Any] = {"scaling": scaling} if self.scaled_to_zero else {"replicas": self.desired}
        rollout = {"progressDeadlineSeconds": DEADLINE, "strategy": self.strategy}
        engine = {"maxNumSeqs": self.edits + 1}
        key = (self.generation, self.edits, self.desired)
        if key not in self._specs:
            one = parse_service(generation=self.generation, rollout=rollout, engine=engine, **spec)
            self._specs[key] = replace(one, spec=one.spec.model_copy(update={"replicas": self.desired}))
            self._revisions[key] = {"worker": worker_revision(one), "router": router_revision(one)}
        return self._specs[key]

    def revision(self, component: str) -> str:
        self._spec()
        return self._revisions[self.generation, self.edits, self.desired][component]

    # What happens

    def edit(self) -> None:
        self.edits, self.generation, self.stepped_at = self.edits + 1, self.generation + 1, self.now
        self.changes += 1

    def resize(self, desired: int) -> None:
        if desired != self.desired:
            self.desired, self.stepped_at = desired, self.now
            self.generation += not self.scaled_to_zero
            self.changes += 1

    def put(self, pod: Pod, state: str, *, stuck: bool = False) -> None:
        if pod.state != state:
            pod.state, pod.since = state, self.now
            self.changes += 1
        pod.stuck = stuck

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component and pod.state != "Evicted"]

    def ready(self, component: str) -> int:
        return sum(pod.state == "Ready" for pod in self.of(component))

    # What the controllers do

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._control("router", 2, self.revision("router"))
        self._control("worker", self.desired, self.revision("worker"))
        for pod in self.pods:
            if (
                pod.stuck
                or pod.state in ("Ready", "Evicted")
                or self.now - pod.since < self.start_seconds / (1 if pod.state == "Loading" else 5)
            ):
                continue
            steps = {"Starting": "Loading", "FailedScheduling": "Starting", "SchedulingGated": "Starting", "ImagePullBackOff": "Loading"}
            self.put(pod, steps.get(pod.state, "Ready"))

    def _control(self, component: str, wanted: int, revision: str) -> None:
        mine = self.of(component)
        old = sorted((pod for pod in mine if pod.revision != revision), key=lambda pod: pod.state == "Ready")
        drains = component == "worker" and self.strategy == "DrainFirst"
        most = wanted + (bool(old) and not drains)
        spare = (old[0].state != "Ready" and len(mine) > wanted - drains) or min(self.ready(component), len(mine)) >= most if old else False
        if old and (not wanted or spare):
            self._end(old[0])
        elif len(mine) < most:
            for _ in range(most - len(mine)):
                self.made += 1
                self.changes += 1
                self.pods.append(Pod(f"{component}-{self.made}", component, revision, self.now, since=self.now))
        elif len(mine) > wanted and not old:
            for pod in sorted(mine, key=lambda pod: (pod.state == "Ready", -pod.made))[: len(mine) - wanted]:
                self._end(pod)

    def _end(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.changes += 1

    # What the operator sees and writes

    def look(self) -> StatusResult:
        """Compute the status once, without writing it."""
        one = self.service()
        observed = Observed(
            deployments={"worker": self._deployment("worker", self.desired), "router": self._deployment("router", 2)},
            pods=tuple(pod.body() for pod in self.pods),
            probe=self.probe,
        )
        now = datetime.fromtimestamp(self.now, UTC)
        return build_service_status(one, observed, next_step(one, observed, self.revision("worker"), now), now)

    def reconcile(self) -> None:
        """Write the status, and send the probes that are due, as the reconciler does."""
        for _ in range(3):
            self.result = result = self.look()
            self.status = result.status
            if not result.servable or result.probe_spent:
                self.probe = None
            if not result.probe_due:
                break
            self.probed_at = self.probed_at if self.router_fails else self.now
            failed = self.probe.attempts if self.probe is not None and self.probe.generation == self.generation else 0
            self.probe = ProbeResult(
                self.generation,
                not self.router_fails,
                "answered 500" if self.router_fails else "",
                (failed + 1) * self.router_fails,
                self.now,
            )

    def _deployment(self, component: str, wanted: int) -> dict[str, Any]:
        mine = self.of(component)
        ready, revision = self.ready(component), self.revision(component)
        updated = sum(pod.revision == revision for pod in mine)
        drains = component == "worker" and self.strategy == "DrainFirst"
        labels = {"app.kubernetes.io/component": component}
        return {
            "metadata": {
                "name": f"qwen-{component}",
                "generation": 1,
                "labels": labels,
                "annotations": {"deployment.kubernetes.io/revision": "1"},
            },
            "spec": {
                "replicas": wanted,
                "selector": {"matchLabels": labels},
                "strategy": {"rollingUpdate": DRAIN if drains else SURGE},
                "template": {"metadata": {"labels": {"fairlead.dev/revision": revision}}},
            },
            "status": {
                "observedGeneration": 1,
                "replicas": len(mine),
                "readyReplicas": ready,
                "availableReplicas": ready,
                "updatedReplicas": updated,
            },
        }

    def condition(self, type_: str) -> Condition | None:
        return find(self.status.conditions, type_)

    @property
    def old(self) -> int:
        """Workers of another revision."""
        return sum(pod.revision != self.revision("worker") for pod in self.of("worker"))

    @property
    def serves(self) -> bool:
        return self.ready("worker") > 0 and self.ready("router") > 0
