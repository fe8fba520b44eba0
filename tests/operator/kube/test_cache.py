"""The store: with events in any order, it holds the newest version of each object, and a late event never undoes a removal."""

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.difference import LastApplied, needs_apply
from fairlead_operator.kube.kinds import PODS


def pod(name: str, version: int, uid: str = "u") -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "qwen"}
    metadata = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": labels, "managedFields": ["big"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"big": 1}, "status": {"version": version}}


@given(st.lists(st.integers(1, 50), min_size=1))
def test_the_newest_version_is_held_in_any_order(versions: list[int]) -> None:
    woken: list[Any] = []
    cache = Cache(woken.append)
    for version in versions:
        cache.put(pod("a", version))
    held = cache.children(("n", "qwen"))["Pod", "a"]
    assert held["status"]["version"] == max(versions) and "spec" not in held and "managedFields" not in held["metadata"]
    assert set(woken) == {("n", "qwen")}


def test_a_full_list_finds_removals_that_the_watch_missed_and_spares_what_is_newer() -> None:
    cache = Cache(lambda _: None)
    cache.put(pod("gone", 5, "g"))
    cache.put(pod("fresh", 20, "f"))
    cache.put(pod("stays", 6, "s"))
    assert cache.retain(PODS, {"s"}, version=10) == 1
    assert {name for _, name in cache.children(("n", "qwen"))} == {"fresh", "stays"}


def test_a_late_removal_of_a_predecessor_spares_its_successor() -> None:
    cache = Cache(lambda _: None)
    cache.put(pod("a", 9, "new"))
    cache.remove(pod("a", 5, "old"))
    assert cache.children(("n", "qwen"))


@pytest.mark.parametrize("label", [None, "other"])
def test_a_child_whose_label_was_edited_leaves_the_service_that_made_it(label: str | None) -> None:
    woken: list[Any] = []
    cache = Cache(woken.append)
    cache.put(pod("a", 5))
    woken.clear()
    edited = pod("a", 6)
    edited["metadata"]["labels"] = {"app.kubernetes.io/instance": label} if label else {}
    cache.put(edited)
    assert not cache.children(("n", "qwen")) and ("n", "qwen") in woken
    assert bool(cache.children(("n", "other"))) is bool(label)
    if label:
        cache.put(pod("a", 5))
        assert not cache.children(("n", "qwen")), "an old version does not bring it back"
    cache.put(pod("a", 7))
    assert cache.children(("n", "qwen")) and not cache.children(("n", "other"))
    cache.remove(edited)
    assert not cache.children(("n", "qwen")), "removed, whatever label the last event shows"


def test_cached_objects_are_read_unchanged_and_share_memory() -> None:
    cache = Cache(lambda _: None)
    bodies = []
    for number in range(200):
        body = pod(f"pod-{number}", number + 1, str(uuid.UUID(int=number * 7919)))
        body["status"] = {"conditions": [{"type": f"Condition{one}", "status": "True", "at": number} for one in range(number % 40)]}
        cache.put(body)
        bodies.append({key: value for key, value in body.items() if key != "spec"})
    held = cache.children(("n", "qwen"))
    for body in bodies:
        slim = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        assert held["Pod", body["metadata"]["name"]] == {**body, "metadata": slim}
    packed = [one.data for one in cache._children["n", "qwen"].values()]
    assert sum(map(len, packed[40:])) < 160 * 300, "compressed alone, the largest take 400 bytes more"


def test_what_has_not_changed_since_it_was_compared_is_not_read_again() -> None:
    cache = Cache(lambda _: None)
    cache.put(pod("a", 7))
    before = cache.versions(("n", "qwen"))
    assert cache.version(("n", "qwen"), ("Pod", "a")) == 7 and cache.version(("n", "qwen"), ("Pod", "b")) == 0
    cache.put(pod("a", 7))
    assert cache.versions(("n", "qwen")) == before
    cache.put(pod("a", 8))
    assert cache.versions(("n", "qwen")) != before


def autoscaler(version: int, milli_cpu: int, **condition: str) -> dict[str, Any]:
    body = pod("qwen-router", version)
    able = {"type": "AbleToScale", "status": "True", "reason": "ReadyForNewScale"}
    metrics = [{"type": "ContainerResource", "containerResource": {"current": {"averageValue": f"{milli_cpu}m"}}}]
    status = {"currentMetrics": metrics, "conditions": [able, {"type": "ScalingActive", **condition}]}
    body["metadata"]["managedFields"] = []
    return {**body, "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": {"maxReplicas": 4}, "status": status}


def test_an_autoscalers_metrics_wake_nobody_and_its_failures_do() -> None:
    woken: list[Any] = []
    cache = Cache(woken.append)
    owner, key = ("n", "qwen"), ("HorizontalPodAutoscaler", "qwen-router")
    cache.put(autoscaler(1, 100, status="True"))
    assert woken == [owner]
    cache.put(autoscaler(2, 200, status="True"))
    assert woken == [owner] and cache.version(owner, key) == 2, "the newest version is held all the same"
    cache.put(autoscaler(1, 300, status="False"))
    assert cache.version(owner, key) == 2, "an old version changes nothing"
    cache.put(autoscaler(3, 300, status="False", reason="FailedGetResourceMetric", message="no metrics-server"))
    held = cache.child(owner, key)
    assert woken == [owner] * 2 and held is not None and held["status"]["conditions"][0]["message"] == "no metrics-server"
    assert held["metadata"]["resourceVersion"] == "3" and "currentMetrics" not in held["status"]
    changed = autoscaler(4, 300, status="False", reason="FailedGetResourceMetric", message="no metrics-server")
    changed["spec"] = {"maxReplicas": 9}
    cache.put(changed)
    assert woken == [owner] * 3
    changed["metadata"] |= {"uid": "another", "resourceVersion": "5"}
    cache.put(changed)
    assert woken == [owner] * 4, "a successor of the same name"


DESIRED = {"metadata": {"name": "x", "labels": {"a": "1"}}, "spec": {"replicas": 1, "containers": [{"name": "w", "cpu": "1000m"}]}}


def live(**spec: Any) -> dict[str, Any]:
    made = {"replicas": 1, "containers": [{"name": "w", "cpu": "1", "image": "defaulted"}], "paused": False}
    return {"metadata": {"uid": "u", "name": "x", "labels": {"a": "1", "theirs": "2"}}, "spec": {**made, **spec}, "status": {"n": 1}}


def test_only_a_difference_in_our_own_fields_is_applied() -> None:
    applied = LastApplied.of(DESIRED, live())
    assert not needs_apply(DESIRED, live(), applied), "rewritten values (1000m → 1) are not a difference"
    assert not needs_apply(DESIRED, live(paused=True), applied), "nor are the fields of others"
    assert not needs_apply(DESIRED, live(containers=[{"name": "side"}, {"name": "w", "cpu": "1"}]), applied)
    assert needs_apply(DESIRED, live(replicas=2), applied)
    assert needs_apply(DESIRED, live(containers=[{"name": "w"}]), applied)
    assert needs_apply({**DESIRED, "spec": {"replicas": 1}}, live(), applied), "a field that is no longer wanted must be given up"
    assert needs_apply(DESIRED, None, applied) and needs_apply(DESIRED, live(), None)


def test_a_list_of_one_namespace_removes_nothing_of_another() -> None:
    cache = Cache(lambda owner: None)
    there = pod("b", 1, "v")
    there["metadata"]["namespace"] = "other"
    cache.put(pod("a", 1))
    cache.put(there)
    assert cache.retain(PODS, (), version=10, namespace="n") == 1
    assert not cache.children(("n", "qwen")) and cache.children(("other", "qwen"))
    assert cache.retain(PODS, (), version=10) == 1 and not cache.children(("other", "qwen"))
