"""An autoscaler that targets the workers' Deployment instead of the service is reported with what to do; a single edit is not."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, deployment, service

from fairlead_operator.desired import desired
from fairlead_operator.kube.difference import slim_managed_fields
from fairlead_operator.observed import FieldConflict, Observed, ProbeResult
from fairlead_operator.reconcile.field_conflicts import WINDOW, FieldConflictTracker
from fairlead_operator.status.conditions import find
from fairlead_operator.status.transitions import events_for

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
KEY = ("Deployment", "qwen-worker")
HPA = "kube-controller-manager"


def scaled(replicas: int, manager: str = HPA) -> dict[str, Any]:
    """The stored Deployment after a user has set its replicas by /scale."""
    entries = [
        {"manager": "fairlead-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:template": {}}}, "time": "2026-01-01T00:00:00Z"},
        {
            "manager": manager,
            "operation": "Update",
            "subresource": "scale",
            "fieldsV1": {"f:spec": {"f:replicas": {}}},
            "time": "2026-01-01T00:00:15Z",
        },
        {"manager": HPA, "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {"f:replicas": {}}}},
    ]
    return {"metadata": {"managedFields": slim_managed_fields({"managedFields": entries})}, "spec": {"replicas": replicas}}


def wanted(replicas: int) -> dict[str, Any]:
    return {"metadata": {"labels": {"app.kubernetes.io/component": "worker"}}, "spec": {"replicas": replicas}}


def test_a_conflict_is_three_overwrites_by_one_manager_in_ten_minutes() -> None:
    now = 1000.0
    field_conflicts = FieldConflictTracker(lambda: now)
    for manager in (HPA, "kubectl-scale", HPA):
        field_conflicts.record(KEY, wanted(2), scaled(5, manager))
        now += 15
    assert field_conflicts.current() == (), "twice by one, once by another"
    field_conflicts.record(KEY, wanted(2), scaled(2))
    assert field_conflicts.current() == (), "it wants what we want"
    field_conflicts.record(KEY, wanted(2), scaled(4))
    assert field_conflicts.current() == (FieldConflict(*KEY, "worker", HPA, now + WINDOW),)
    now += WINDOW
    assert field_conflicts.current() == (), "it did not happen again for as long"
    for _ in range(5):
        field_conflicts.record(KEY, wanted(2), scaled(5))
        now += WINDOW / 2
    assert field_conflicts.current() == (), "twice in ten minutes at most"


def test_our_own_edits_and_other_fields_are_no_conflict() -> None:
    field_conflicts = FieldConflictTracker(lambda: 0.0)
    plain = scaled(5)
    plain["metadata"]["managedFields"] = slim_managed_fields(
        {"managedFields": [{"manager": HPA, "operation": "Update", "fieldsV1": {"f:metadata": {}}, "time": "2026-01-01T00:00:00Z"}]}
    )
    for _ in range(3):
        field_conflicts.record(KEY, wanted(2), plain)
        field_conflicts.record(("Service", "qwen"), {"metadata": {}, "spec": {}}, scaled(5))
    assert field_conflicts.current() == ()


@pytest.mark.parametrize(
    ("component", "manager", "spec", "words"),
    [
        ("worker", HPA, {}, "point it at the InferenceService: scaleTargetRef: {apiVersion: fairlead.dev/v1alpha1, kind: InferenceService"),
        (
            "worker",
            HPA,
            {"scaling": {"maxReplicas": 3, "target": {"ttftMilliseconds": 2000}}},
            "with spec.scaling.target the operator sizes this service",
        ),
        ("worker", "kubectl", {}, "kubectl scale inferenceservices.fairlead.dev qwen --replicas=N"),
        ("router", HPA, {}, "spec.routing.replicas says how many routers there are"),
    ],
)
def test_a_conflict_sets_degraded_and_makes_one_event_with_the_fix(component: str, manager: str, spec: dict[str, Any], words: str) -> None:
    until = NOW.timestamp() + 300
    contest = FieldConflict("Deployment", f"qwen-{component}", component, manager, until)
    seen = Observed(
        {"worker": deployment("worker", 1), "router": deployment("router", 2)},
        probe=ProbeResult(1, True, "", 0, NOW.timestamp()),
        field_conflicts=(contest,),
    )
    plan = desired(service(**spec), seen, SETTINGS, NOW)
    fault, ready = find(plan.status.conditions, "Degraded"), find(plan.status.conditions, "Ready")
    assert fault is not None and (fault.status, fault.reason) == ("True", "ReplicasConflict") and words in fault.message
    assert f"Deployment qwen-{component}" in fault.message and (HPA in fault.message) == (manager == HPA)
    assert ready is not None and ready.status == "True", "it serves all the same"
    assert plan.wake_at is not None and plan.wake_at <= until
    before = desired(service(**spec), Observed(seen.deployments, probe=seen.probe), SETTINGS, NOW).status
    assert [one[:2] for one in events_for(before, plan.status)] == [("Warning", "ReplicasConflict")]
    assert events_for(plan.status, plan.status) == []
