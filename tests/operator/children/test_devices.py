"""GPUs of worker pods: extended resources of device plugins (NVIDIA, MIG, AMD) and claims of Dynamic Resource Allocation."""

from dataclasses import replace
from typing import Any

import pytest
from tests.operator.children.test_desired import NOW
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import worker_revision
from fairlead_operator.rollout.node_capacity import find_pending
from fairlead_operator.settings import Settings

CLAIM = {"name": "gpu", "resourceClaimTemplateName": "h100"}


def worker_spec(resources: dict[str, Any], engine: dict[str, Any] | None = None, settings: Settings = SETTINGS) -> Any:
    made = desired(service(resources=resources, engine=engine or {}), Observed(), settings, NOW).objects
    (deployment,) = [one for one in made if one["kind"] == "Deployment" and one["metadata"]["name"] == "qwen-worker"]
    return deployment["spec"]["template"]["spec"]


def tolerated(spec: Any) -> set[str]:
    return {one["key"] for one in spec.get("tolerations", [])}


@pytest.mark.parametrize(
    ("resources", "parallel", "limits", "taints"),
    [
        ({}, 1, {"nvidia.com/gpu": "1"}, {"nvidia.com/gpu"}),
        ({"gpuResource": "nvidia.com/mig-1g.10gb"}, 1, {"nvidia.com/mig-1g.10gb": "1"}, {"nvidia.com/gpu", "nvidia.com/mig-1g.10gb"}),
        ({"gpuResource": "amd.com/gpu"}, 8, {"amd.com/gpu": "8"}, {"amd.com/gpu"}),
        ({"gpuResource": "amd.com/gpu", "gpus": 2, "memory": "8Gi"}, 2, {"amd.com/gpu": "2", "memory": "8Gi"}, {"amd.com/gpu"}),
        ({"gpuResource": "gpu.intel.com/i915"}, 1, {"gpu.intel.com/i915": "1"}, {"gpu.intel.com/i915"}),
        ({"gpus": 0, "memory": "8Gi"}, 1, {"memory": "8Gi"}, set()),
    ],
)
def test_a_worker_requests_the_named_resource_and_tolerates_its_taint(
    resources: dict[str, Any], parallel: int, limits: dict[str, str], taints: set[str]
) -> None:
    spec = worker_spec(resources, {"tensorParallel": parallel})
    assert spec["containers"][0]["resources"]["limits"] == limits
    assert limits.items() <= spec["containers"][0]["resources"]["requests"].items(), "an extended resource has equal requests and limits"
    assert tolerated(spec) == taints and "resourceClaims" not in spec


def test_claims_take_the_place_of_the_device_plugin() -> None:
    spec = worker_spec({"resourceClaims": [CLAIM], "cpu": "4", "memory": "8Gi"}, {"tensorParallel": 4})
    assert spec["resourceClaims"] == [CLAIM]
    assert spec["containers"][0]["resources"] == {
        "requests": {"cpu": "4", "memory": "8Gi"},
        "limits": {"memory": "8Gi"},
        "claims": [{"name": "gpu"}],
    }
    assert tolerated(spec) == {"nvidia.com/gpu", "amd.com/gpu"}, "a claim does not name its vendor"


def test_claims_of_the_pod_template_for_other_devices_are_added() -> None:
    nic = {"name": "nic", "resourceClaimTemplateName": "rdma"}
    container = {"name": "worker", "resources": {"claims": [{"name": "nic"}]}}
    template = {"spec": {"resourceClaims": [nic], "containers": [container]}}
    made = desired(service(resources={"resourceClaims": [CLAIM]}, podTemplate=template), Observed(), SETTINGS, NOW).objects
    (spec,) = [one["spec"]["template"]["spec"] for one in made if one["metadata"]["name"] == "qwen-worker" and one["kind"] == "Deployment"]
    assert spec["resourceClaims"] == [CLAIM, nic]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": "gpu"}, {"name": "nic"}], "neither hides the other's device"


@pytest.mark.parametrize("resources", [{"gpuResource": "amd.com/gpu"}, {"resourceClaims": [CLAIM]}])
def test_a_manifest_that_names_its_gpus_gets_them_on_an_installation_for_cpus(resources: dict[str, Any]) -> None:
    cpus = replace(SETTINGS, default_gpus=0, worker_gpu_image="gpu:1")
    spec = worker_spec(resources, settings=cpus)
    assert spec["containers"][0]["image"] == "gpu:1" and ("limits" in spec["containers"][0]["resources"] or spec["resourceClaims"])
    assert worker_spec({}, settings=cpus)["containers"][0]["image"] == "worker:1"


@pytest.mark.parametrize(
    ("resources", "label"),
    [
        ({"gpuType": "H100"}, "nvidia.com/gpu.product"),
        ({"gpuType": "A100", "gpuResource": "nvidia.com/mig-1g.10gb"}, "nvidia.com/gpu.product"),
        ({"gpuType": "MI300X", "gpuResource": "amd.com/gpu"}, "amd.com/gpu.product-name"),
    ],
)
def test_the_type_of_gpu_is_the_label_of_its_vendor(resources: dict[str, Any], label: str) -> None:
    affinity = worker_spec(resources)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert affinity["nodeSelectorTerms"] == [{"matchExpressions": [{"key": label, "operator": "In", "values": [resources["gpuType"]]}]}]


def test_groups_of_several_nodes_have_claims_in_every_pod() -> None:
    one = service(resources={"resourceClaims": [CLAIM]}, engine={"tensorParallel": 16, "nodes": 2})
    (group,) = [made for made in desired(one, Observed(), SETTINGS, NOW).objects if made["kind"] == "LeaderWorkerSet"]
    for template in ("leaderTemplate", "workerTemplate"):
        assert group["spec"]["leaderWorkerTemplate"][template]["spec"]["resourceClaims"] == [CLAIM]


def test_another_source_of_gpus_is_another_revision() -> None:
    choices: list[dict[str, Any]] = [{}, {"gpuResource": "amd.com/gpu"}, {"resourceClaims": [CLAIM]}]
    assert len({worker_revision(service(resources=one)) for one in choices}) == 3


@pytest.mark.parametrize(
    ("message", "helps"),
    [
        ("0/3 nodes are available: 3 Insufficient amd.com/gpu.", True),
        ("0/3 nodes are available: 3 Insufficient nvidia.com/mig-1g.10gb.", True),
        ("0/3 nodes are available: 3 cannot allocate all claims. still not schedulable, preemption: 0/3 nodes are available", True),
        ("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.", False),
    ],
)
def test_draining_a_worker_frees_its_device(message: str, helps: bool) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pending = find_pending([{"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "status": {"conditions": [condition]}}], {}, 1, {})
    assert pending is not None and pending.drain_helps == helps
