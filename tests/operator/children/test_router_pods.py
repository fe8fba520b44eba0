"""`spec.router`: the template of router pods, and their number under load."""

import json
from typing import Any

import pytest
from tests.operator.status.test_status import NOW
from tests.operator.support.manifests import SETTINGS, deployment, service

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.kube.discovery import needs_optional_kind
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import router_revision, worker_revision

HPA = "HorizontalPodAutoscaler"
HPA_WRITES = [
    {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale", "fieldsV1": '{"f:spec":{"f:replicas":{}}}'}
]
AUTOSCALED = {"routing": {"replicas": 2}, "router": {"autoscaling": {"maxReplicas": 6}}}


def made(one: InferenceService, observed: Observed | None = None) -> dict[tuple[str, str], Any]:
    plan = desired(one, observed or Observed(served=frozenset({HPA})), SETTINGS, NOW)
    return {(each["kind"], each["metadata"]["name"]): each for each in plan.objects}


def router_pod(one: InferenceService) -> Any:
    return made(one)["Deployment", "qwen-router"]["spec"]["template"]


def routers(count: int | None, *, by_autoscaler: bool) -> Observed:
    live = deployment("router", count or 0)
    if count is None:
        del live["spec"]["replicas"]
    live["metadata"]["managedFields"] = HPA_WRITES if by_autoscaler else []
    return Observed({"router": live}, served=frozenset({HPA}))


def test_the_router_template_is_merged_like_that_of_the_workers() -> None:
    zone = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    template = {
        "metadata": {"labels": {"team": "a", "app.kubernetes.io/component": "stolen"}, "annotations": {"mesh": "off"}},
        "spec": {
            "nodeSelector": {"pool": "cpu"},
            "priorityClassName": "high",
            "tolerations": [{"key": "dedicated", "operator": "Exists"}],
            "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [zone]}}},
            "topologySpreadConstraints": [
                {"topologyKey": "topology.kubernetes.io/zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
            ],
            "containers": [
                {"name": "router", "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "8Gi"}}},
                {"name": "side", "image": "s"},
            ],
        },
    }
    pod = router_pod(service(router={"podTemplate": template}))
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "router" and pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"] == {"mesh": "off"}
    spec = pod["spec"]
    assert spec["nodeSelector"] == {"pool": "cpu"} and spec["priorityClassName"] == "high" and spec["tolerations"][0]["key"] == "dedicated"
    assert spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] == [zone]
    keys = [each["topologyKey"] for each in spec["topologySpreadConstraints"]]
    assert keys == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    container, side = spec["containers"]
    assert container["resources"] == {"requests": {"cpu": "1", "memory": "256Mi"}, "limits": {"cpu": "4", "memory": "8Gi"}}
    assert container["command"] == ["fairlead-router"] and side["name"] == "side"


def test_the_router_template_restarts_routers_alone_and_an_absent_one_nobody() -> None:
    plain = service()
    for unused in ({}, {"podTemplate": {}}, {"autoscaling": {"maxReplicas": 4}}):
        assert router_revision(service(router=unused)) == router_revision(plain)
    labelled = service(router={"podTemplate": {"spec": {"priorityClassName": "high"}}})
    assert router_revision(labelled) != router_revision(plain) and worker_revision(labelled) == worker_revision(plain)


def test_an_autoscaler_of_routers_is_made_between_its_bounds() -> None:
    hpa = made(service(**AUTOSCALED))[HPA, "qwen-router"]["spec"]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (2, 6)
    assert hpa["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "qwen-router"}
    resource = hpa["metrics"][0]["containerResource"]
    assert resource == {"name": "cpu", "container": "router", "target": {"type": "AverageValue", "averageValue": "700m"}}
    assert not [key for key in made(service()) if key[0] == HPA]
    assert not [key for key in made(service(**AUTOSCALED), Observed()) if key[0] == HPA], "not before the cluster is known to serve it"
    assert needs_optional_kind(AUTOSCALED) and not needs_optional_kind({"router": {}})


@pytest.mark.parametrize(
    ("live", "by_autoscaler", "sent", "wanted"),
    [
        (2, False, 2, 2),  # ours: leaving it out would reset it to 1
        (4, False, 4, 4),
        (4, True, None, 4),  # the autoscaler's: a value of ours could undo its next one
        (9, True, 6, 6),
        (0, True, 2, 2),  # an autoscaler leaves a Deployment of 0 alone
        (1, True, 2, 2),
        (None, False, 2, 2),
    ],
)
def test_the_autoscaler_s_number_stays_within_the_bounds(live: int | None, by_autoscaler: bool, sent: int | None, wanted: int) -> None:
    observed = routers(live, by_autoscaler=by_autoscaler)
    plan = desired(service(**AUTOSCALED), observed, SETTINGS, NOW)
    (child,) = [each for each in plan.objects if (each["kind"], each["metadata"]["name"]) == ("Deployment", "qwen-router")]
    assert child["spec"].get("replicas") == sent and plan.status.routers is not None
    assert plan.status.routers.desired_replicas == wanted
    fixed = made(service(), observed)["Deployment", "qwen-router"]["spec"]
    assert fixed["replicas"] == 2, "without spec.router.autoscaling the spec decides"


def test_the_status_says_why_routers_do_not_follow_their_load() -> None:
    condition = {"type": "ScalingActive", "status": "False", "reason": "FailedGetContainerResourceMetric", "message": "no metrics"}
    hpa = {"status": {"conditions": [condition]}}
    for served, live, words in (
        (frozenset({HPA}), {HPA: hpa}, "FailedGetContainerResourceMetric: no metrics"),
        (frozenset({HPA}), {}, ""),
        (frozenset(), {}, "does not serve"),
    ):
        observed = Observed({"router": deployment("router", 3, ready=2)}, served=served, optional_objects=live)
        status = desired(service(**AUTOSCALED), observed, SETTINGS, NOW).status.routers
        assert status is not None and words in status.message and bool(words) == bool(status.message)
        assert (status.desired_replicas, status.replicas, status.ready_replicas) == (3, 3, 2)


@pytest.mark.parametrize(
    ("budget", "nodes", "expected"),
    [
        ({}, 1, {"maxUnavailable": 1}),
        ({"maxUnavailable": "25%"}, 1, {"maxUnavailable": "25%"}),
        ({"maxUnavailable": 0}, 1, {"maxUnavailable": 0}),
        ({"minAvailable": 2}, 1, {"minAvailable": 2}),
        ({"minAvailable": "75%", "maxUnavailable": 1}, 1, {"minAvailable": "75%"}),  # as the API server writes the default
        ({"minAvailable": 2}, 2, {"minAvailable": 4}),  # workers of two pods
        ({"minAvailable": "50%"}, 2, {"minAvailable": "50%"}),
    ],
)
def test_disruption_budgets_in_pods_and_in_percent(budget: dict[str, Any], nodes: int, expected: dict[str, Any]) -> None:
    engine = {"nodes": nodes, "tensorParallel": nodes}
    spec = made(service(podDisruptionBudget=budget, engine=engine))["PodDisruptionBudget", "qwen-worker"]["spec"]
    assert {key: spec[key] for key in spec.keys() & {"maxUnavailable", "minAvailable"}} == json.loads(json.dumps(expected))
