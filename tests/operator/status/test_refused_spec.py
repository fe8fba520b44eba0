"""A refused spec waits for its correction: the status still describes what runs."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.operator.reconcile.test_reconciler import OWNER, Recording, dependencies
from tests.operator.support.manifests import SETTINGS, container, deployment, manifest, pod, service

from fairlead_operator.api import ServiceStatus
from fairlead_operator.api.status import Condition, ImageUpdateStatus
from fairlead_operator.causes import Cause
from fairlead_operator.desired import desired
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.observed import Observed, ObservedIndex, ObservedTraffic, ProbeResult
from fairlead_operator.reconcile.reconciler import Dependencies, Reconciler
from fairlead_operator.rollout.waves import Member, plan_wave
from fairlead_operator.settings import WaveLimits
from fairlead_operator.status import refused_spec
from fairlead_operator.status.conditions import find

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
PROBLEM = Cause("InvalidSpec", "spec.engine.dtype: must be one of ... (got 'int3')", fault=True)
SERVING = {"worker": deployment("worker", 2), "router": deployment("router", 2)}


def served() -> ServiceStatus:
    """What stood before the edit."""
    proven = ProbeResult(1, True, "", 0, NOW.timestamp())
    seen = Observed(SERVING, probe=proven, index=ObservedIndex("Available", read="Mirror"), traffic=ObservedTraffic(120, 900, 40))
    return desired(service(replicas=2), seen, SETTINGS, NOW).status


def edited(observed: Observed, *, before: ServiceStatus | None = None, seconds: float = 60) -> ServiceStatus:
    status = (before or served()).model_dump(by_alias=True, mode="json")
    one = service(generation=2, status=status)
    return refused_spec.build_status(one, PROBLEM, observed, NOW + timedelta(seconds=seconds))[0]


def conditions(status: ServiceStatus) -> dict[str, tuple[str, str]]:
    return {one.type: (one.status, one.reason) for one in status.conditions}


def test_a_serving_service_stays_available_during_an_invalid_edit() -> None:
    before = served()
    after = edited(Observed(SERVING, index=ObservedIndex("Available", read="Mirror"), traffic=ObservedTraffic(120, 900, 40)))
    assert conditions(after) == {
        "Ready": ("True", "Serving"),
        "Available": ("True", "Serving"),
        "Progressing": ("False", "InvalidSpec"),
        "Stalled": ("True", "InvalidSpec"),
        "WeightsReady": ("True", "Loaded"),
        "Routable": ("True", "RouterReady"),
        "PodTemplateValid": ("True", "Accepted"),
        "Degraded": ("True", "InvalidSpec"),
        "UpToDate": ("True", "Current"),
    }
    assert after.observed_generation == 2
    ready = find(after.conditions, "Ready")
    assert ready is not None and ready.observed_generation == 1, "kubectl wait does not take it for the edit's"
    said_of_both = (
        "url",
        "model_name",
        "selector",
        "revision",
        "desired_replicas",
        "replicas",
        "ready_replicas",
        "updated_replicas",
        "index",
        "traffic",
    )
    assert {name: getattr(after, name) for name in said_of_both} == {name: getattr(before, name) for name in said_of_both}
    kept, new = find(before.conditions, "PodTemplateValid"), find(after.conditions, "PodTemplateValid")
    assert kept == new, "said of the generation whose pods run"


def test_the_state_of_the_workers_is_still_reported() -> None:
    crashed = container({"waiting": {"reason": "CrashLoopBackOff"}}, {"terminated": {"exitCode": 1, "message": "CUDA driver is gone"}})
    failing = Observed(
        {"worker": deployment("worker", 2, ready=0), "router": deployment("router", 2)},
        pods=(pod("a", containerStatuses=[crashed]), pod("b", containerStatuses=[crashed])),
        index=ObservedIndex("Unavailable", reason="redis is away"),
        traffic=ObservedTraffic(120, 900, 40),
    )
    after = edited(failing, seconds=300)
    told = conditions(after)
    assert told["Ready"] == ("False", "InvalidSpec") and told["Available"] == ("False", "NoWorker")
    assert told["Degraded"][1] in ("CrashLoopBackOff", "Crashed"), "Ready says what is wrong with the spec, Degraded what runs badly"
    assert told["WeightsReady"][0] == "False" and after.desired_replicas == 2 and after.ready_replicas == 0
    assert after.index is not None and after.index.state == "Unavailable"
    assert after.traffic is not None and after.traffic.tokens_per_second == 0
    rolling = Observed({"worker": deployment("worker", 2, updated=1) | {}, "router": deployment("router", 2)})
    rolling.deployments["worker"]["status"]["replicas"] = 3
    assert conditions(edited(rolling))["Progressing"] == ("True", "RollingOut"), "of the edit before this one"


def test_a_service_without_children_reports_the_fault_only() -> None:
    after = edited(Observed(), before=ServiceStatus())
    fault = ("True", "InvalidSpec")
    assert conditions(after) == {"Ready": ("False", "InvalidSpec"), "Degraded": fault, "Stalled": fault} and after.desired_replicas == 0


def test_live_routes_and_groups_are_reported() -> None:
    refused = {"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners", "message": "no"}
    route = {
        "metadata": {"namespace": "default"},
        "spec": {"parentRefs": [{"name": "web", "namespace": "gateways"}]},
        "status": {"parents": [{"conditions": [refused]}]},
    }
    after = edited(Observed(SERVING, optional_objects={"HTTPRoute": route}))
    assert conditions(after)["GatewayReady"] == ("False", "NotAllowedByListeners")
    assert conditions(after)["Degraded"] == ("True", "NotAllowedByListeners")
    ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    leaders = tuple(pod(f"qwen-worker-{number}", revision="abc", **ready) for number in range(2))
    template = {"metadata": {"labels": {"fairlead.dev/revision": "abc", "app.kubernetes.io/component": "worker"}}}
    groups = {
        "metadata": {"name": "qwen-worker", "generation": 1},
        "spec": {"replicas": 2, "leaderWorkerTemplate": {"leaderTemplate": template}},
    }
    after = edited(Observed({"router": deployment("router", 2)}, leaders, optional_objects={"LeaderWorkerSet": groups}))
    assert conditions(after)["Available"] == ("True", "Serving") and (after.ready_replicas, after.desired_replicas) == (2, 2)


def child(body: dict[str, Any], kind: str, name: str, version: int) -> dict[str, Any]:
    labels = {**body["metadata"].get("labels", {}), "app.kubernetes.io/instance": "qwen"}
    metadata = {**body["metadata"], "name": name, "namespace": "default", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {**body, "apiVersion": "apps/v1" if kind == "Deployment" else "v1", "kind": kind, "metadata": metadata}


async def test_the_reconciler_keeps_polling_and_reports_the_fault_once() -> None:
    cache, cluster, events = Cache(lambda _: None), Recording(), []

    class Router:
        async def fetch_workers(self, address: str) -> dict[str, Any]:
            assert address == "10.0.0.9:8082"
            return {"index": "ok", "index_read": "mirror", "workers": []}

    body = manifest(engine={"dtype": "Int3"})
    body["metadata"] |= {"uid": "u", "resourceVersion": "5", "generation": 2}
    body["status"] = served().model_dump(by_alias=True, mode="json") | {"index": None}
    cache.put(body)
    cache.put(child(deployment("worker", 2), "Deployment", "qwen-worker", 6))
    cache.put(child(deployment("router", 1), "Deployment", "qwen-router", 6))
    ready = {"conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}], "podIP": "10.0.0.9"}
    cache.put(child(pod("qwen-router-1", "router", **ready), "Pod", "qwen-router-1", 6))
    shared = Dependencies(
        **{**vars(dependencies(cache, cluster, Router())), "record_event": lambda _, *said: events.append(said), "work_queue": WorkQueue(1)}
    )
    loop = Reconciler(OWNER, shared)

    def told() -> dict[str, str]:
        return {one["type"]: one["reason"] for one in cluster.status["conditions"]}

    try:
        await loop.reconcile()
        assert (
            told()["Ready"] == "Serving"
            and told()["Stalled"] == "InvalidSpec"
            and told()["Available"] == "Serving"
            and (cluster.status["readyReplicas"], cluster.status["desiredReplicas"]) == (2, 2)
        )
        assert [event[:2] for event in events] == [("Warning", "InvalidSpec")] and "spec.engine.dtype" in events[0][2]
        await asyncio.wait_for(loop._wake_event.wait(), 10)  # the router has told of the index
        cache.put(cache.service(OWNER) | {"status": cluster.status, "metadata": {**body["metadata"], "resourceVersion": "7"}})
        cache.put(child(deployment("worker", 2, ready=0), "Deployment", "qwen-worker", 8))
        await loop.reconcile()
        assert (
            told()["Available"] == "NoWorker"
            and (cluster.status["readyReplicas"], cluster.status["desiredReplicas"]) == (0, 2)
            and cluster.status["index"]["state"] == "Available"
        )
        assert [event[:2] for event in events] == 2 * [("Warning", "InvalidSpec")], "it is not Ready any more"
        assert cluster.asked == 0, "no child was looked at, made or taken away"
    finally:
        loop._stop_polling()


def updating(phase: str, reason: str) -> ServiceStatus:
    """A service that takes part in the rollout of new images when its spec is edited."""
    before = served()
    conditions = [one for one in before.conditions if one.type != "UpToDate"]
    since = NOW.strftime("%Y-%m-%dT%H:%M:%SZ")
    conditions.append(Condition(type="UpToDate", status="False", reason=reason, last_transition_time=since, message="before"))
    update = ImageUpdateStatus.model_validate({"phase": phase, "worker_image": "worker:2", "router_image": "control:2", "surge_gpus": 1})
    return before.model_copy(update={"image_update": update, "conditions": conditions})


def test_a_waiting_service_with_a_refused_spec_is_not_admitted_and_says_why() -> None:
    after = edited(Observed(SERVING), before=updating("Waiting", "WaitingForWave"))
    member, told = Member.of(OWNER, after), find(after.conditions, "UpToDate")
    assert Member.of(OWNER, updating("Waiting", "WaitingForWave")).admissible and not member.admissible
    assert plan_wave([member], (), WaveLimits()).admitted == frozenset()
    assert told is not None and (told.status, told.reason, told.message) == ("False", "Waiting", PROBLEM.message)


def test_an_update_that_a_refused_spec_holds_up_frees_its_place_until_the_spec_is_corrected() -> None:
    before = updating("RollingOut", "RollingOut")
    after = edited(Observed(SERVING), before=before)
    update, told = after.image_update, find(after.conditions, "UpToDate")
    assert update is not None and (update.phase, update.held, update.surge_gpus) == ("RollingOut", True, 0)
    assert told is not None and (told.reason, told.message) == ("RollingOut", PROBLEM.message)
    waits = Member(("default", "other"), "Waiting", admissible=True)
    limits = WaveLimits(max_services=1)
    assert plan_wave([Member.of(OWNER, before), waits], (), limits).admitted == frozenset()
    assert plan_wave([Member.of(OWNER, after), waits], (), limits).admitted == {waits.owner}
    corrected = service(replicas=2, generation=3, rollout={"engineVersion": "Auto"}, status=after.model_dump(by_alias=True, mode="json"))
    resumed = desired(corrected, Observed(SERVING), SETTINGS, NOW + timedelta(seconds=90)).status.image_update
    assert resumed is not None and (resumed.phase, resumed.held, resumed.surge_gpus, resumed.message) == ("RollingOut", False, 1, "")


def test_a_surge_worker_of_a_held_update_keeps_its_gpu_and_other_phases_stay() -> None:
    surging = deployment("worker", 2)
    surging["status"]["replicas"] = 3
    held = edited(Observed(SERVING | {"worker": surging}), before=updating("RollingOut", "RollingOut")).image_update
    assert held is not None and held.surge_gpus == 1
    for phase in ("Current", "Failed", "Held"):
        before = updating(phase, phase)
        after = edited(Observed(SERVING), before=before)
        told = find(after.conditions, "UpToDate")
        assert after.image_update == before.image_update and told is not None and (told.reason, told.message) == (phase, "before")
