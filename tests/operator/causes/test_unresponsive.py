"""Reasons that only the time shows: a controller, scheduler or kubelet that does nothing."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.support.manifests import deployment, pod

from fairlead_operator.causes import unresponsive
from fairlead_operator.kube.difference import slim_managed_fields

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
MINE = {"app.kubernetes.io/component": "worker"}


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_an_unresponsive_controller_is_reported_and_a_slow_one_is_not() -> None:
    made = deployment("worker", 1)
    made["metadata"] |= {"name": "qwen-worker", "creationTimestamp": "2026-01-01T12:00:00Z"}
    made["status"] = {}
    assert unresponsive.find_cause([made], [], at(59)) == (None, NOW.timestamp() + 60)
    cause, wake_at = unresponsive.find_cause([made], [], at(60))
    assert (
        cause is not None and cause.reason == "ControllerNotResponding" and "kube-controller-manager" in cause.message and wake_at is None
    )
    made["metadata"]["managedFields"] = [{"time": "2026-01-01T12:00:50Z"}]  # our newest edit: it has a minute from then on
    assert unresponsive.find_cause([made], [], at(60)) == (None, NOW.timestamp() + 110)
    annotated = {"manager": "kubectl-annotate", "time": "2026-01-01T12:01:30Z", "fieldsV1": {}}
    kept = slim_managed_fields({"managedFields": [annotated, {**annotated, "subresource": "status", "time": "2026-01-01T12:09:00Z"}]})
    assert unresponsive.find_cause([made | {"metadata": {**made["metadata"], "managedFields": kept}}], [], at(120))[0] is None, (
        "a user's edit just now"
    )
    made["status"] = {"observedGeneration": 1}
    cause, _ = unresponsive.find_cause([made], [], at(200))
    assert cause is not None and "no pod was created" in cause.message
    assert unresponsive.find_cause([made], [pod()], at(200))[0] is None, "a pod of it is there"
    going = pod("qwen-worker-canary-1")
    going["metadata"]["labels"]["fairlead.dev/track"] = "canary"
    assert unresponsive.find_cause([made], [going], at(200))[0] is not None, "that one is a canary's"
    canary = made | {
        "metadata": {**made["metadata"], "labels": {"app.kubernetes.io/component": "worker-canary"}},
        "spec": {"replicas": 1, "selector": {"matchLabels": {**MINE, "fairlead.dev/track": "canary"}}},
    }
    assert unresponsive.find_cause([canary], [going], at(200))[0] is None, "it drains, and then there will be another"
    quota = {"type": "ReplicaFailure", "status": "True"}
    made["status"]["conditions"] = [quota]
    assert unresponsive.find_cause([made], [], at(200)) == (None, None), "another cause explains it"


@pytest.mark.parametrize(
    ("metadata", "status", "late", "reason", "words"),
    [
        ({}, {}, 60, "SchedulerNotResponding", "kube-scheduler"),
        (
            {},
            {"conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T12:00:10Z"}]},
            130,
            "NodeNotResponding",
            "get nodes",
        ),
        ({"deletionTimestamp": "2026-01-01T12:02:00Z"}, {"phase": "Running"}, 180, "StuckTerminating", "--force"),
        ({"deletionTimestamp": "2026-01-01T12:02:00Z", "finalizers": ["a/b"]}, {}, 180, "StuckTerminating", r"finalizers \(a/b\)"),
    ],
)
def test_an_unresponsive_scheduler_or_kubelet_is_reported_after_its_grace(
    metadata: dict[str, Any], status: dict[str, Any], late: float, reason: str, words: str
) -> None:
    one = pod(**status)
    one["metadata"] |= {"creationTimestamp": "2026-01-01T12:00:00Z", **metadata}
    assert unresponsive.find_cause([], [one], at(late - 1)) == (None, NOW.timestamp() + late)
    cause, _ = unresponsive.find_cause([], [one], at(late))
    assert cause is not None and cause.reason == reason and re.search(words, cause.message)


def test_an_own_scheduler_is_named() -> None:
    one = pod() | {"spec": {"schedulerName": "gang"}}
    one["metadata"] |= {"creationTimestamp": "2026-01-01T12:00:00Z"}
    cause, _ = unresponsive.find_cause([], [one], at(60))
    assert cause is not None and "whether the scheduler gang runs" in cause.message
