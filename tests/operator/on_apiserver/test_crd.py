"""The CRD on a real API server: what is accepted, what it becomes, and in which words the rest is refused."""

import json

import pytest
import yaml
from tests.operator import apiserver
from tests.operator.manifests import manifest

BASE = "/apis/fairlead.dev/v1alpha1/namespaces/{}/inferenceservices"


def test_six_lines_are_complete_and_show_every_default(server: apiserver.ApiServer, namespace: str) -> None:
    made = server.create(BASE.format(namespace), manifest("qwen", namespace))
    spec = made["spec"]
    assert spec["replicas"] == 1 and spec["routing"] == {
        "policy": "PrefixAware",
        "indexMode": "Auto",
        "indexGroups": 1,
        "replicas": 2,
        "holdTimeout": "30s",
        "steering": "Proxy",
        "metricsNames": "Fairlead",
    }
    assert spec["engine"]["kvCache"] == {"pageTokens": 16, "blockTokens": 64}
    assert spec["rollout"] == {
        "strategy": "Auto",
        "surgeTimeout": "30s",
        "paused": False,
        "drainTimeout": "120s",
        "progressDeadline": "1h",
    }
    assert spec["disruption"] == {"maxUnavailable": 1}
    assert spec["resources"] == {} and "scaling" not in spec and "podTemplate" not in spec


REFUSED = [
    ({"model": {"uri": "s4://x/y"}}, "spec.model.uri must be hf://ORG/NAME"),
    ({"model": {"uri": "file:///m", "revision": "abc"}}, "spec.model.revision is for hf:// models"),
    ({"model": {"uri": "hf://a/b@c", "revision": "abc"}}, "keep one of the two"),
    ({"model": {"uri": "file:///m", "secretRef": {"name": "t"}}}, "spec.model.secretRef is for hf:// models"),
    ({"model": {"uri": "pvc://c/m", "cache": {"claim": "t"}}}, "spec.model.cache keeps downloads"),
    ({"model": {"adapters": [{"name": "a", "uri": "x"}]}}, "spec.model.adapters.uri must be hf://ORG/NAME"),
    ({"model": {"adapters": [{"name": "a b", "uri": "hf://a/b"}]}}, "spec.model.adapters[0].name"),
    (
        {"model": {"adapters": [{"name": "a", "uri": "hf://a/b"}, {"name": "a", "uri": "hf://a/c"}]}},
        "spec.model.adapters[1]: Duplicate value",
    ),
    ({"model": {"name": "m", "adapters": [{"name": "m", "uri": "hf://a/b"}]}}, "spec.model.adapters may not have the model's own name"),
    ({"model": {"adapters": [{"name": "qwen", "uri": "hf://a/b"}]}}, "spec.model.adapters may not have the model's own name"),
    ({"model": {"cache": {"claim": "t", "size": "1Gi"}}}, "exactly one of claim, hostPath and size"),
    ({"model": {"cache": {}}}, "exactly one of claim, hostPath and size"),
    ({"model": {"cache": {"hostPath": "/models/../etc"}}}, "spec.model.cache.hostPath must not go up by '..'"),
    ({"model": {"region": "eu-1"}}, "spec.model.endpoint and region are for s3://"),
    ({"scaling": {"min": 5, "max": 2}}, "spec.scaling.min must be at most spec.scaling.max"),
    ({"scaling": {"max": 2, "target": {"ttft": "2s"}}, "replicas": 2}, "spec.replicas and spec.scaling.target decide the same"),
    ({"scaling": {"max": 2, "target": {"ttft": "0s"}}}, "spec.scaling.target.ttft must be above 0s"),
    ({"scaling": {"max": 2, "target": {"ttft": "2s"}, "idleAfter": "1m"}}, "spec.scaling.idleAfter takes the last worker away"),
    ({"scaling": {"min": 0, "max": 2, "idleAfter": "1m"}}, "spec.scaling.idleAfter takes the last worker away"),
    ({"scaling": {"min": 0, "max": 2, "target": {"ttft": "2s"}, "idleAfter": "25h"}}, "spec.scaling.idleAfter must lie between"),
    ({"scaling": {"max": 2, "scaleDownStabilization": "1m"}}, "spec.scaling.scaleDownStabilization is for the operator's own autoscaler"),
    ({"scaling": {"max": 2, "target": {"ttft": "1s"}, "scaleDownStabilization": "2h"}}, "scaleDownStabilization must be at most 1h"),
    (
        {"engine": {"tensorParallel": 2}, "resources": {"gpus": 4}},
        "spec.engine.tensorParallel must equal spec.resources.gpus: a worker uses all",
    ),
    (
        {"engine": {"tensorParallel": 2}, "resources": {"gpus": 0}},
        "spec.engine.tensorParallel must equal spec.resources.gpus: a worker uses all",
    ),
    (
        {"engine": {"tensorParallel": 16, "nodes": 2}, "resources": {"gpus": 16}},
        "for one replica (over several nodes: gpus times spec.engine.nodes)",
    ),
    ({"engine": {"tensorParallel": 9, "nodes": 2}}, "spec.engine.tensorParallel must be a multiple of spec.engine.nodes"),
    ({"engine": {"nodes": 2}}, "spec.engine.tensorParallel must be a multiple of spec.engine.nodes"),
    ({"engine": {"tensorParallel": 16, "nodes": 2}, "rollout": {"canary": {}}}, "spec.rollout.canary is for workers of one pod"),
    (
        {"engine": {"kvCache": {"pageTokens": 16, "blockTokens": 40}}},
        "spec.engine.kvCache.blockTokens must be a multiple of spec.engine.kvCache.pageTokens",
    ),
    ({"engine": {"kvCache": {"size": "1Gi", "pages": 4}}}, "keep one of the two"),
    ({"engine": {"maxModelLen": 8}}, "spec.engine.maxModelLen must be 0"),
    ({"engine": {"dtype": "int3"}}, 'spec.engine.dtype: Unsupported value: "int3"'),
    ({"engine": {"speculative": {"method": "draft"}}}, "spec.engine.speculative.model is the draft model"),
    ({"engine": {"speculative": {"method": "ngram", "model": "hf://a/b"}}}, "spec.engine.speculative.model is the draft model"),
    ({"engine": {"speculative": {"method": "draft", "model": "s4://x/y"}}}, "spec.engine.speculative.model must be hf://ORG/NAME"),
    ({"engine": {"itlTargetMs": 30, "chunkedPrefillSize": -1}}, "spec.engine.itlTargetMs cuts prompts into chunks"),
    ({"engine": {"quantization": "int8"}, "resources": {"gpus": 1}}, "spec.engine.quantization int8 is for workers on CPUs"),
    ({"engine": {"quantization": "fp8"}, "resources": {"gpus": 0}}, "spec.engine.quantization fp8 is for workers on GPUs"),
    ({"rollout": {"drainTimeout": "3h"}}, "spec.rollout.drainTimeout must be at most 2h"),
    ({"rollout": {"drainTimeout": "soon"}}, "spec.rollout.drainTimeout"),
    ({"rollout": {"progressDeadline": "1s"}}, "spec.rollout.progressDeadline must lie between"),
    (
        {"rollout": {"surgeTimeout": "2m", "progressDeadline": "1m"}},
        "spec.rollout.surgeTimeout must be at most spec.rollout.progressDeadline",
    ),
    ({"rollout": {"strategy": "Recreate"}}, "spec.rollout.strategy"),
    ({"rollout": {"revision": "yesterday's"}}, "spec.rollout.revision"),
    ({"replicas": -1}, "spec.replicas"),
    ({"resources": {"memory": "lots"}}, "spec.resources.memory"),
    ({"routing": {"policy": "Best"}}, "spec.routing.policy"),
    ({"routing": {"indexMode": "mirror"}}, 'spec.routing.indexMode: Unsupported value: "mirror"'),
    ({"routing": {"indexMode": "Mirror", "indexGroups": 2}}, "set spec.routing.indexGroups to 1"),
    ({"routing": {"indexMode": "Remote", "policy": "Random"}}, "spec.routing.indexMode says how PrefixAware reads the index"),
    ({"routing": {"maxExpectedTtft": "0s"}}, "spec.routing.maxExpectedTtft must be above 0s"),
    ({"routing": {"steering": "Redirect"}, "access": {"keysSecretRef": {"name": "k"}}}, "spec.routing.steering Redirect goes past"),
    ({"engine": {"nonsense": 1}}, 'unknown field "spec.engine.nonsense"'),
    ({"podTemplate": {"specs": {}}}, 'unknown field "spec.podTemplate.specs"'),
]


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=[json.dumps(spec) for spec, _ in REFUSED])
def test_refused_with_a_message_that_names_the_field(server: apiserver.ApiServer, namespace: str, spec: dict, words: str) -> None:
    with pytest.raises(apiserver.Refused) as refused:
        server.create(BASE.format(namespace), manifest("qwen", namespace, **json.loads(json.dumps(spec))))
    assert words in str(refused.value)


ACCEPTED = [
    {"engine": {"tensorParallel": 2}},
    {"engine": {"tensorParallel": 2}, "resources": {"gpus": 2}},
    {"engine": {"tensorParallel": 16, "nodes": 2}},
    {"engine": {"tensorParallel": 16, "nodes": 2}, "resources": {"gpus": 8}},
    {"resources": {"gpus": 0, "cpu": "500m", "memory": "2Gi"}},
    {"resources": {"gpus": 0}, "engine": {"quantization": "int8"}},
    {"engine": {"quantization": "int4"}, "resources": {"gpus": 1}},
    {"engine": {"quantization": "int4"}, "resources": {"gpus": 0}},
    {"engine": {"quantization": "fp8"}, "resources": {"gpus": 1}},
    {"engine": {"attentionBackend": "native", "itlTargetMs": 30, "prefillMaxRequests": 1}},
    {"engine": {"speculative": {"method": "ngram", "numTokens": 3}}},
    {"engine": {"speculative": {"method": "draft", "numTokens": 5, "model": "pvc://models/draft"}}},
    {"scaling": {"max": 4}, "replicas": 9},
    {"scaling": {"min": 0, "max": 4, "target": {"ttft": "1500ms"}, "idleAfter": "10m", "scaleDownStabilization": "0s"}},
    {
        "routing": {"indexMode": "Mirror", "holdTimeout": "0s", "maxExpectedTtft": "1s"},
        "access": {"keysSecretRef": {"name": "k", "key": "x"}},
    },
    {"routing": {"indexMode": "Remote", "indexGroups": 2, "steering": "Redirect", "metricsNames": "vLLM"}},
    {"model": {"uri": "pvc://models/qwen/8b"}},
    {"model": {"uri": "file:///models/tiny"}},
    {"model": {"name": "m", "adapters": [{"name": "qwen", "uri": "hf://a/b@main"}, {"name": "org/sql", "uri": "pvc://models/sql"}]}},
    {"model": {"revision": "9c925d64d72725edaf899c6cb9c377fd0709d9c5", "secretRef": {"name": "hub"}, "cache": {"claim": "models"}}},
    {"model": {"uri": "s3://models/qwen", "endpoint": "http://minio:9000", "region": "eu-1", "cache": {"size": "9Gi"}}},
    {"model": {"uri": "oci://ghcr.io/org/qwen:1.0#8b"}},
    {"resources": {"gpuType": "NVIDIA-H100-80GB-HBM3"}, "imagePullSecrets": ["registry"], "engine": {"warmTokens": 0}},
    {"rollout": {"drainTimeout": "0s"}},
    {"rollout": {"strategy": "DrainFirst", "surgeTimeout": "0s", "paused": True, "progressDeadline": "30s"}},
    {"rollout": {"revision": "qwen-worker-c51d9689d7", "progressDeadline": "30s"}},
    {"podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [{"operator": "Exists"}], "anything": {"goes": 1}}}},
]


@pytest.mark.parametrize("spec", ACCEPTED, ids=json.dumps)
def test_accepted(server: apiserver.ApiServer, namespace: str, spec: dict) -> None:
    made = server.create(BASE.format(namespace), manifest("qwen", namespace, **json.loads(json.dumps(spec))))
    for key, value in spec.items():
        if key not in ("replicas", "podTemplate", "scaling", "model", "imagePullSecrets"):
            assert value.items() <= made["spec"][key].items()
    assert "podTemplate" not in spec or made["spec"]["podTemplate"]["spec"] == spec["podTemplate"]["spec"]


@pytest.mark.parametrize("name", ["9lives", "a" * 53])
def test_names_that_no_service_could_have(server: apiserver.ApiServer, namespace: str, name: str) -> None:
    with pytest.raises(apiserver.Refused, match=r"metadata\.name must be at most 52"):
        server.create(BASE.format(namespace), manifest(name, namespace))


def test_kubectl_apply_refuses_unknown_fields_and_prints_columns(server: apiserver.ApiServer, namespace: str) -> None:
    if apiserver.program("kubectl") is None:
        pytest.skip("kubectl not found: run `make kubernetes` once")
    wrong = yaml.safe_dump(manifest("qwen", namespace, replica=3))
    refused = server.kubectl("apply", "-f", "-", stdin=wrong)
    assert refused.returncode != 0 and 'unknown field "spec.replica"' in refused.stderr
    applied = server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest("qwen", namespace)))
    assert applied.returncode == 0, applied.stderr
    table = server.kubectl("get", "infer", "-n", namespace)
    assert table.stdout.split("\n")[0].split() == ["NAME", "MODEL", "READY", "REASON", "URL", "AGE"], table
    described = server.kubectl("explain", "infer.spec.engine.kvCache")
    assert "blockTokens" in described.stdout and "unit of the prefix index" in described.stdout


def test_scale_reads_and_writes_replicas(server: apiserver.ApiServer, namespace: str) -> None:
    path = BASE.format(namespace)
    server.create(path, manifest("qwen", namespace))
    code, scale = server.request("GET", f"{path}/qwen/scale")
    assert code == 200 and scale["spec"]["replicas"] == 1
    code, _ = server.request("PATCH", f"{path}/qwen/scale", {"spec": {"replicas": 3}}, "application/merge-patch+json")
    assert code == 200 and server.get(f"{path}/qwen")["spec"]["replicas"] == 3
