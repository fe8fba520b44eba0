"""The next step of a rollout as a pure function: the choice of Auto; pauses; and the return to an earlier revision."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.api import InferenceService
from fairlead_operator.children import worker
from fairlead_operator.desired import Desired, desired
from fairlead_operator.observed import Observed, PodEvent
from fairlead_operator.revisions import worker_revision
from fairlead_operator.rollout.node_capacity import DepartureTracker
from fairlead_operator.rollout.step import DRAIN, SURGE
from fairlead_operator.status.conditions import find

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
NEW = worker_revision(service())
INSUFFICIENT = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/3 nodes are available"


def ago(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat()


def pod(name: str, revision: str, waits: float | None = None, words: str = INSUFFICIENT, gone_in: float | None = None) -> dict[str, Any]:
    """A worker that has a node, or has waited for one for `waits` seconds."""
    scheduled: dict[str, Any] = {"type": "PodScheduled", "status": "True"}
    if waits is not None:
        scheduled |= {"status": "False", "reason": "Unschedulable", "message": words, "lastTransitionTime": ago(waits)}
    labels = {"app.kubernetes.io/component": "worker", "fairlead.dev/revision": revision}
    metadata = {"name": name, "uid": name, "labels": labels} | ({} if gone_in is None else {"deletionTimestamp": ago(-gone_in)})
    return {"kind": "Pod", "metadata": metadata, "status": {"conditions": [scheduled]}}


def live(revision: str = NEW, bounds: Any = SURGE, *, taken_up: bool = True, wanted: int = 2, **status: Any) -> dict[str, Any]:
    """The workers' Deployment, of which one new worker is there beside the old ones."""
    annotations = {"deployment.kubernetes.io/revision": "1"} if taken_up else {}
    counts = {"observedGeneration": 1, "replicas": 3, "updatedReplicas": 1, "readyReplicas": 2, "availableReplicas": 2}
    return {
        "metadata": {"generation": 1, "annotations": annotations, "labels": {"app.kubernetes.io/component": "worker"}},
        "spec": {
            "replicas": wanted,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": bounds},
            "template": {"metadata": {"labels": {"fairlead.dev/revision": revision}}},
        },
        "status": counts | status,
    }


def look(observed: Observed, **spec: Any) -> Desired:
    return desired(service(**{"replicas": 2, **spec}), observed, SETTINGS, NOW)


def seen(*pods: dict[str, Any], deployment: dict[str, Any] | None = None, **more: Any) -> Observed:
    old = [pod("old-1", "old"), pod("old-2", "old")]
    return Observed({"worker": deployment or live()}, pods=(*old, *pods), **more)


def bounds(plan: Desired) -> Any:
    return workers(plan)["strategy"]["rollingUpdate"]


def workers(plan: Desired) -> Any:
    return next(made for made in plan.objects if made["metadata"]["name"] == "qwen-worker" and made["kind"] == "Deployment")["spec"]


def said(plan: Desired, type_: str = "Progressing") -> tuple[str, str, str]:
    condition = find(plan.status.conditions, type_)
    assert condition is not None
    return condition.status, condition.reason, condition.message


def test_auto_surges_and_drains_when_the_surge_worker_has_waited() -> None:
    early = look(seen(pod("new", NEW, waits=29)))
    assert bounds(early) == SURGE and early.wake_at == NOW.timestamp() + 1
    assert said(early)[2].startswith("surging; the surge worker waits for room; 1 of 2")
    assert said(early, "Degraded")[0] == "False" and said(early, "Ready")[1] == "RollingOut", "a wait that is meant to be is no fault"
    late = look(seen(pod("new", NEW, waits=30)))
    assert bounds(late) == DRAIN and "no room for a surge worker in 30 s: draining one first" in said(late)[2]
    assert bounds(look(seen(pod("new", NEW, waits=30)), rollout={"surgeTimeoutSeconds": 60})) == SURGE
    assert bounds(look(seen(pod("new", NEW)))) == SURGE, "it has a node and loads"


def test_the_choice_of_auto_stays_for_its_revision_and_during_a_rollout() -> None:
    assert bounds(look(seen(pod("new", NEW), deployment=live(bounds=DRAIN)))) == DRAIN
    assert bounds(look(seen(pod("new", NEW), deployment=live("old", DRAIN)))) == DRAIN, "taken back amid draining"
    finished = Observed({"worker": live("old", DRAIN)}, pods=(pod("a", "old"), pod("b", "old")))
    assert bounds(look(finished)) == SURGE, "a new revision tries anew"
    assert bounds(look(Observed())) == SURGE


@pytest.mark.parametrize(("strategy", "made"), [("Surge", SURGE), ("DrainFirst", DRAIN)])
def test_a_strategy_that_is_named_is_kept_to(strategy: str, made: Any) -> None:
    plan = look(seen(pod("new", NEW, waits=3600)), rollout={"strategy": strategy})
    assert bounds(plan) == made
    assert ("set spec.rollout.strategy to Auto" in said(plan)[2]) == (strategy == "Surge")
    assert (said(plan, "Degraded")[1] == "FailedScheduling") == (strategy == "Surge")


def test_no_worker_is_drained_while_capacity_is_being_freed() -> None:
    leaving = pod("leaving", "old", gone_in=100)
    plan = look(seen(pod("new", NEW, waits=90), leaving))
    assert bounds(plan) == SURGE and plan.wake_at == NOW.timestamp() + 130
    assert bounds(look(seen(pod("new", NEW, waits=90), pod("lost", "old", gone_in=-31)))) == DRAIN, "one that should have gone long ago"
    assert bounds(look(seen(pod("new", NEW, waits=90), last_departure_at=NOW.timestamp() - 10))) == SURGE, (
        "the scheduler has not looked yet"
    )


def test_a_canary_that_goes_gives_its_room_to_the_rollout() -> None:
    """Its entry has been taken out of the spec: the GPU that its pod holds until it has drained is the one that the surge worker gets."""
    canary = pod("canary", "tried", gone_in=100)
    canary["metadata"]["labels"]["fairlead.dev/track"] = "canary"
    plan = look(seen(pod("new", NEW, waits=40), canary))
    assert bounds(plan) == SURGE and plan.wake_at == NOW.timestamp() + 130
    stays = pod("canary", NEW)
    stays["metadata"]["labels"]["fairlead.dev/track"] = "canary"
    assert bounds(look(seen(pod("new", NEW, waits=40), stays))) == DRAIN, "one that stays has no part in it"


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (INSUFFICIENT, DRAIN),
        ("0/2 nodes are available: 1 Too many pods, 1 node(s) had untolerated taint {a: b}.", DRAIN),
        ("0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector. preemption: 2 Insufficient cpu.", SURGE),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {x: y}. no new claims to deallocate, preemption: not helpful.", SURGE),
        ("", DRAIN),
    ],
)
def test_a_worker_that_fits_no_node_drains_no_other(words: str, made: Any) -> None:
    plan = look(seen(pod("new", NEW, waits=3600, words=words)))
    assert bounds(plan) == made
    if made == SURGE:
        assert "draining a worker would not help: 0/" in said(plan)[2] and said(plan, "Degraded")[1] == "FailedScheduling"


ATTACHED = 'Multi-Attach error for volume "pvc-1" Volume is already exclusively attached to one node and can\'t be attached to another'


def test_a_volume_of_one_node_is_freed_by_draining_and_a_pod_that_waits_for_it_is_no_fault_until_then() -> None:
    """The surge worker of a ReadWriteOnce claim may get another node."""
    surge = {**pod("new", NEW), "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}}
    for waits, made in ((10.0, SURGE), (31.0, DRAIN)):
        surge["status"]["conditions"][0]["lastTransitionTime"] = ago(waits)
        plan = look(seen(surge, pod_events={"new": PodEvent("FailedAttachVolume", ATTACHED)}), rollout={"progressDeadlineSeconds": 60})
        assert bounds(plan) == made
        degraded = find(plan.status.conditions, "Degraded")
        assert degraded is not None and degraded.status == "False", degraded
        other = seen(surge, pod_events={"new": PodEvent("FailedMount", "timed out waiting for the condition")})
        assert bounds(look(other)) == SURGE, "draining gains nothing"


def test_a_quota_that_refuses_the_surge_worker_is_no_room_either() -> None:
    refusal = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "lastTransitionTime": ago(31)}
    quota = live(updatedReplicas=0, replicas=2, conditions=[refusal | {"message": "pods is forbidden: exceeded quota: gpus"}])
    assert bounds(look(seen(deployment=quota))) == DRAIN
    policy = live(updatedReplicas=0, replicas=2, conditions=[refusal | {"message": 'violates PodSecurity "restricted"'}])
    assert bounds(look(seen(deployment=policy))) == SURGE, "a drained worker would not come back"


def test_a_rollout_that_draining_may_not_go_on_with_says_why() -> None:
    plan = look(seen(pod("new", NEW), deployment=live(bounds=DRAIN, wanted=4, availableReplicas=2)), replicas=4)
    assert "waiting until 3 workers are available (2 now) before another is drained" in said(plan)[2]


def test_paused_holds_pods_and_not_their_number_and_a_first_rollout_not_at_all() -> None:
    rollout = {"paused": True}
    plan = look(seen(pod("new", NEW, waits=99)), rollout=rollout, replicas=5)
    assert workers(plan)["paused"] and workers(plan)["replicas"] == 5 and bounds(plan) == SURGE
    assert said(plan)[:2] == ("False", "Paused") and said(look(seen(), rollout=rollout), "Ready")[1] == "Paused"
    assert not workers(look(Observed(), rollout=rollout))["paused"]
    assert not workers(look(seen(deployment=live(taken_up=False)), rollout=rollout))["paused"], "without a ReplicaSet it would never begin"


def test_past_its_deadline_a_rollout_is_degraded_and_says_what_to_do() -> None:
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "ReplicaSet has timed out progressing.",
    }
    plan = look(seen(pod("new", NEW), deployment=live(conditions=[late])))
    for type_, truth in (("Progressing", "False"), ("Degraded", "True")):
        assert said(plan, type_)[:2] == (truth, "ProgressDeadlineExceeded")
        assert "2 workers of the revision before are kept. Undo the edit" in said(plan, type_)[2]


def revisions_of(*services: InferenceService) -> tuple[Any, ...]:
    return tuple(made for one in services for made in worker.objects(one, SETTINGS) if made["kind"] == "ControllerRevision")


def test_back_to_a_revision_by_its_name_or_its_digest() -> None:
    first = service(engine={"maxNumSeqs": 7})
    digest = worker_revision(first)
    kept = revisions_of(first, service())
    for name in (f"qwen-worker-{digest}", digest):
        plan = look(Observed(revisions=kept), rollout={"revision": name})
        assert "--max-num-seqs=7" in workers(plan)["template"]["spec"]["containers"][0]["args"]
        assert plan.status.revision == f"qwen-{digest}"
    assert "--max-num-seqs=256" in workers(look(Observed(revisions=kept)))["template"]["spec"]["containers"][0]["args"]


def test_a_revision_that_is_not_kept_changes_nothing_and_says_which_are() -> None:
    first = service(engine={"maxNumSeqs": 7})
    digest = worker_revision(first)
    observed = seen(deployment=live(digest), revisions=revisions_of(first))
    plan = look(observed, rollout={"revision": "qwen-worker-0123456789"})
    assert "--max-num-seqs=7" in workers(plan)["template"]["spec"]["containers"][0]["args"], "as it runs"
    for type_ in ("Progressing", "Degraded"):
        assert said(plan, type_)[1] == "RevisionNotFound" and f"name one of: qwen-worker-{digest}" in said(plan, type_)[2]


def test_a_revision_of_a_deleted_service_of_this_name_is_not_taken_for_one_of_ours() -> None:
    first = service(engine={"maxNumSeqs": 7})
    left = revisions_of(replace(first, uid="uid-0"))
    plan = look(Observed(revisions=left), rollout={"revision": f"qwen-worker-{worker_revision(first)}"})
    assert said(plan)[1] == "RevisionNotFound"
    assert "--max-num-seqs=256" in workers(plan)["template"]["spec"]["containers"][0]["args"]


def test_revisions_that_workers_run_are_kept_beyond_the_last_five() -> None:
    kept = revisions_of(*(service(engine={"maxNumSeqs": number}) for number in range(1, 10)))
    numbered = tuple({**body, "revision": number} for number, body in enumerate(kept, start=1))
    oldest = worker_revision(service(engine={"maxNumSeqs": 1}))
    plan = look(Observed(revisions=numbered, pods=(pod("a", oldest),)))
    names = {made["metadata"]["name"] for made in plan.objects if made["kind"] == "ControllerRevision"}
    assert f"qwen-worker-{oldest}" in names and len([name for name in names if "-worker-" in name]) == 6


def test_the_last_departure_is_tracked() -> None:
    departures = DepartureTracker(10.0)
    a, b = pod("a", "old"), pod("b", "old")
    assert departures.since([a, b], 11.0) == 10.0, "a process that has just started has seen nothing before"
    assert departures.since([a], 12.0) == 12.0 and departures.since([a, b], 13.0) == 12.0
