"""`fairlead migrate`: KubeAI's Model."""

import pytest
from tests.cli.migrate.samples import MODEL, load, only

from fairlead.migrate.command import convert

PROFILES = """
resourceProfiles:
  big: {imageName: amd-gpu, limits: {amd.com/gpu: 1}, requests: {cpu: 500m, memory: 1.5Gi}, nodeSelector: {pool: b}, other: 1}
  nvidia-gpu-l4: {requests: {cpu: 7}, tolerations: [{key: own}]}
modelServers: {VLLM: {images: {default: "vllm:1", amd-gpu: "rocm:1"}}}
"""
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"}


def test_a_model_becomes_the_pod_that_kubeai_makes() -> None:
    made, messages = only(MODEL)
    spec = made["spec"]
    assert made["metadata"]["labels"] == {"team": "a"}
    assert spec["model"] == {"uri": "hf://org/llama", "adapters": [{"name": "llama_a", "uri": "hf://org/a"}]}
    assert spec["scaling"] == {
        "minReplicas": 1,
        "maxReplicas": 5,
        "target": {"ttftMilliseconds": 2000},
        "scaleDown": {"stabilizationWindowSeconds": 60},
    }
    env = [{"name": "NCCL_DEBUG", "value": "INFO"}]
    assert spec["engine"] == {"runtime": "VLLM", "maxModelLen": 8192, "tensorParallel": 2, "env": env}
    assert spec["resources"] == {"gpus": 2, "cpu": "12", "memory": "48Gi"} and spec["routing"] == {"policy": "PrefixAware"}
    pod = spec["podTemplate"]["spec"]
    assert pod["priorityClassName"] == "high" and pod["tolerations"] == [TOLERATION]
    assert pod["initContainers"] == [{"name": "engine", "envFrom": [{"secretRef": {"name": "more"}}]}]
    names = (
        "owner cacheProfile files features loadBalancing.prefixHash replicas targetRequests resourceProfile env url envFrom engine.image"
    )
    for listed in names.split():
        assert f"spec.{listed}" in messages, listed


def test_profiles_of_the_charts_values_and_fixed_replicas() -> None:
    fixed = MODEL.replace("nvidia-gpu-l4:2", "big:2").replace("  minReplicas: 1", "  autoscalingDisabled: true")
    made, messages = only(f"{fixed}\n---\n{PROFILES}")
    spec = made["spec"]
    assert spec["resources"] == {"gpuResource": "amd.com/gpu", "gpus": 2, "cpu": "1000m", "memory": "3.0Gi"}
    assert spec["replicas"] == 2 and "scaling" not in spec and spec["engine"]["image"] == "rocm:1"
    assert spec["podTemplate"]["spec"]["nodeSelector"] == {"pool": "b"}
    assert "spec.maxReplicas 5" in messages and "resourceProfiles.big.other 1" in messages
    made, messages = only(f"{MODEL}\n---\n{PROFILES}".replace("  maxReplicas: 5\n", ""))
    assert made["spec"]["resources"] == {"gpus": 2, "cpu": "14", "memory": "48Gi"} and made["spec"]["engine"]["image"] == "vllm:1"
    assert made["spec"]["podTemplate"]["spec"]["tolerations"] == [{"key": "own"}], "Helm replaces a list"
    assert made["spec"]["scaling"]["maxReplicas"] == 10 and "KubeAI has no limit" in messages


@pytest.mark.parametrize(("fewest", "most"), [(0, 10), (9, 10), (10, 11), (20, 21)])
def test_a_model_without_maximum_scales_above_its_minimum(fewest: int, most: int) -> None:
    made, messages = only(MODEL.replace("minReplicas: 1", f"minReplicas: {fewest}").replace("  maxReplicas: 5\n", ""))
    scaling = made["spec"]["scaling"]
    assert (scaling["minReplicas"], scaling["maxReplicas"]) == (fewest, most) and f"spec.scaling.maxReplicas is {most}," in messages


@pytest.mark.parametrize(("given", "made"), [("1e3", "2e3"), ("1.5E+9", "3.0E+9"), ("1E", "2E"), ("1Ei", "2Ei"), ("500m", "1000m")])
def test_a_quantity_of_a_profile_is_multiplied(given: str, made: str) -> None:
    assert only(f"{MODEL}\n---\n{PROFILES}".replace("cpu: 7", f"memory: {given!r}"))[0]["spec"]["resources"]["memory"] == made


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("engine: VLLM", "engine: OLlama", 'spec.engine "OLlama": only VLLM can be migrated'),
        ("nvidia-gpu-l4:2", "tpu:2", "is not of KubeAI's chart: give the chart's values"),
        ("nvidia-gpu-l4:2", "nvidia-gpu-l4", "must be NAME:COUNT"),
        ("nvidia-gpu-l4:2", "nvidia-gpu-l4:0", "'nvidia-gpu-l4:0' must be NAME:COUNT, with 1 unit or more"),
        ("hf://org/llama", "oss://b/m", "'oss://b/m': copy the model to a claim"),
        ("PrefixHash", "Other", 'spec.loadBalancing.strategy "Other" is not of the type'),
    ],
)
def test_what_cannot_be_migrated_is_refused(old: str, new: str, words: str) -> None:
    result = convert(load(MODEL.replace(old, new)))
    assert not result.documents and words in result.messages[0]
