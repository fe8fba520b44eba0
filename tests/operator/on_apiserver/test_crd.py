"""The CRD on a real API server: accepted manifests, their defaults, and the messages of refusals."""

import copy
import json
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.manifests import manifest, service, unsupported_setting

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.engine_runtime import UNSUPPORTED
from fairlead_operator.revisions import worker_revision

BASE = "/apis/fairlead.dev/v1alpha1/namespaces/{}/inferenceservices"


def check(server: apiserver.ApiServer, name: str = "qwen", /, **spec: Any) -> Any:
    """Return the service that would be stored; raises Refused. Nothing is stored, so it needs no namespace of its own."""
    return server.create(BASE.format("default"), manifest(name, "default", **copy.deepcopy(spec)), dry_run=True)


def test_six_lines_are_complete_and_show_every_default(server: apiserver.ApiServer, namespace: str) -> None:
    made = server.create(BASE.format(namespace), manifest("qwen", namespace))
    spec = made["spec"]
    assert spec["replicas"] == 1 and spec["routing"] == {
        "policy": "PrefixAware",
        "indexMode": "Auto",
        "replicas": 2,
        "holdTimeoutSeconds": 30,
        "forwardingMode": "Proxy",
        "metricsNames": "Fairlead",
    }
    assert spec["engine"]["kvCache"] == {"pageTokens": 16, "blockTokens": 64, "dtype": "Auto"}
    assert spec["rollout"] == {
        "strategy": "Auto",
        "surgeTimeoutSeconds": 30,
        "paused": False,
        "drainTimeoutSeconds": 120,
        "progressDeadlineSeconds": 3600,
        "engineVersion": "Pinned",
    }
    assert spec["podDisruptionBudget"] == {"maxUnavailable": 1}
    assert spec["resources"] == {} and "scaling" not in spec and "podTemplate" not in spec


def test_quantities_may_be_whole_numbers(server: apiserver.ApiServer, namespace: str) -> None:
    """YAML reads `cpu: 2` as a number, and Kubernetes takes it in a PodSpec."""
    spec = {"resources": {"cpu": 2, "memory": 8589934592}, "engine": {"kvCache": {"size": 1000000000}}}
    made = server.create(BASE.format(namespace), manifest("qwen", namespace, **spec))
    read = InferenceService.parse(made).spec
    assert (read.resources.cpu, read.resources.memory, read.engine.kv_cache.size) == ("2", "8589934592", "1000000000")
    written = {"resources": {"cpu": "2", "memory": "8589934592"}, "engine": {"kvCache": {"size": "1000000000"}}}
    assert worker_revision(service(**spec)) == worker_revision(service(**written))


def test_items_of_lists_get_no_defaults(server: apiserver.ApiServer, namespace: str) -> None:
    """Argo CD compares the live list with that of the manifest, and would report each default forever."""
    schedule = {"name": "day", "start": "0 8 * * *", "end": "0 18 * * *", "minReplicas": 2}
    spec = {
        "slo": {"classes": [{"name": "chat", "ttftMilliseconds": 500}]},
        "scaling": {"maxReplicas": 4, "schedules": [schedule]},
        "model": {"adapters": [{"name": "sql", "uri": "hf://a/b"}]},
        "exposure": {"otherServices": ["other"]},
    }
    made = server.create(BASE.format(namespace), manifest("qwen", namespace, **spec))["spec"]
    assert made["slo"]["classes"] == spec["slo"]["classes"] and made["scaling"]["schedules"] == [schedule]
    assert made["model"]["adapters"] == spec["model"]["adapters"]
    read = InferenceService.parse(manifest("qwen", namespace, **spec)).spec
    assert read.slo is not None and read.slo.classes[0].priority == 0
    assert read.scaling is not None and read.scaling.schedules[0].time_zone == "UTC"


@pytest.mark.parametrize(("length", "replicas", "accepted"), [(43, 10, True), (44, 1, False), (52, 1, False)])
def test_names_of_workers_on_several_nodes_fit_into_labels(
    server: apiserver.ApiServer, namespace: str, length: int, replicas: int, accepted: bool
) -> None:
    body = manifest("q" * length, namespace, replicas=replicas, engine={"nodes": 2, "tensorParallel": 2})
    code, answer = server.request("POST", BASE.format(namespace), body)
    assert (code == 201) is accepted, answer
    if not accepted:
        assert "metadata.name must be at most 43 characters with spec.engine.nodes above 1" in answer["message"]
        with pytest.raises(InvalidManifest, match="at most 43 characters"):
            InferenceService.parse(body)
    assert server.request("POST", BASE.format(namespace), manifest("r" * length, namespace))[0] == 201, "with one node it may be longer"


@pytest.mark.parametrize("name", ["/models/Qwen3-8B", "/mnt/models", "org/name", "a"])
def test_a_served_name_may_be_the_folder_of_the_model(server: apiserver.ApiServer, name: str) -> None:
    """Clients of vLLM send what `--model` says."""
    check(server, model={"name": name})


CLAIMS, TARGET = [{"name": "gpu", "resourceClaimTemplateName": "h100"}], {"target": {"ttftMilliseconds": 2000}}
REFUSED = [
    ({"resources": {"cpu": -1}}, "spec.resources.cpu"),
    ({"resources": {"cpu": True}}, "spec.resources.cpu"),
    ({"model": {"uri": "s4://x/y"}}, "spec.model.uri must be hf://ORG/NAME"),
    ({"model": {"uri": "file:///m", "revision": "abc"}}, "spec.model.revision needs an hf:// model"),
    ({"model": {"uri": "hf://a/b@c", "revision": "abc"}}, "keep one of the two"),
    ({"model": {"uri": "file:///m", "secretRef": {"name": "t"}}}, "spec.model.secretRef needs an hf://"),
    ({"model": {"uri": "pvc://c/m", "cache": {"persistentVolumeClaim": {"claimName": "t"}}}}, "spec.model.cache needs an hf://"),
    ({"resources": {"gpuResource": "gpu"}}, "spec.resources.gpuResource"),
    ({"resources": {"gpus": 0, "gpuResource": "amd.com/gpu"}}, "spec.resources.gpus is 0"),
    ({"resources": {"gpus": 0, "resourceClaims": CLAIMS}}, "spec.resources.gpus is 0"),
    (
        {"resources": {"gpuResource": "amd.com/gpu", "resourceClaims": CLAIMS}},
        "spec.resources.gpuResource and spec.resources.resourceClaims both",
    ),
    ({"resources": {"resourceClaims": CLAIMS, "gpuType": "H100"}}, "spec.resources.gpuType is a node label"),
    ({"resources": {"gpuResource": "gpu.intel.com/i915", "gpuType": "Max"}}, "spec.resources.gpuType is a node label"),
    (
        {"resources": {"gpuResource": "nvidia.com/mig-3g.40gb"}, "engine": {"tensorParallel": 2}},
        "spec.engine.tensorParallel must be 1 with MIG",
    ),
    (
        {"resources": {"gpuResource": "amd.com/gpu", "gpus": 2}, "engine": {"tensorParallel": 4}},
        "spec.engine.tensorParallel must equal spec.resources.gpus",
    ),
    ({"batch": {"storageURI": "pvc://c", "secretName": "keys"}}, "spec.batch.secretName needs an s3:// storageURI"),
    ({"batch": {"storageURI": "file:///x"}}, "spec.batch.storageURI"),
    ({"rollout": {"restartedAt": "yesterday"}}, "spec.rollout.restartedAt"),
    ({"rollout": {"engineVersion": "latest"}}, "spec.rollout.engineVersion"),
    ({"engine": {"image": "two words"}}, "spec.engine.image"),
    ({"routing": {"image": "two words"}}, "spec.routing.image"),
    ({"model": {"adapters": [{"name": "a", "uri": "x"}]}}, "spec.model.adapters.uri must be hf://ORG/NAME"),
    ({"model": {"adapters": [{"name": "a b", "uri": "hf://a/b"}]}}, "spec.model.adapters[0].name"),
    (
        {"model": {"adapters": [{"name": "a", "uri": "hf://a/b"}, {"name": "a", "uri": "hf://a/c"}]}},
        "spec.model.adapters[1]: Duplicate value",
    ),
    (
        {"model": {"name": "m", "adapters": [{"name": "m", "uri": "hf://a/b"}]}},
        "spec.model.adapters must not contain the name of the model",
    ),
    ({"model": {"adapters": [{"name": "qwen", "uri": "hf://a/b"}]}}, "spec.model.adapters must not contain the name of the model"),
    (
        {"model": {"cache": {"persistentVolumeClaim": {"claimName": "t"}, "emptyDir": {"sizeLimit": "1Gi"}}}},
        "exactly one of persistentVolumeClaim, hostPath and emptyDir",
    ),
    (
        {"model": {"cache": {"emptyDir": {"sizeLimit": "1Gi"}, "prefetch": "Enabled"}}},
        "spec.model.cache.prefetch needs persistentVolumeClaim",
    ),
    ({"model": {"cache": {}}}, "exactly one of persistentVolumeClaim, hostPath and emptyDir"),
    ({"model": {"cache": {"hostPath": {"path": "/models/../etc"}}}}, "spec.model.cache.hostPath.path must not contain '..'"),
    ({"podDisruptionBudget": {"maxUnavailable": "101%"}}, "spec.podDisruptionBudget: must be a number"),
    ({"podDisruptionBudget": {"minAvailable": -1}}, "spec.podDisruptionBudget: must be a number"),
    ({"podDisruptionBudget": {"minAvailable": 1, "maxUnavailable": "50%"}}, "exclude each other"),
    (
        {"exposure": {"otherServices": ["b"], "gateway": {"parentRef": {"name": "g"}, "backend": "EndpointPicker"}}},
        "spec.exposure.otherServices needs routers that forward requests",
    ),
    ({"exposure": {"otherServices": ["b"]}, "routing": {"forwardingMode": "Redirect"}}, "forwardingMode Redirect sends clients to workers"),
    ({"profileRef": {"name": "a", "excludedFields": ["routing..x"]}}, "spec.profileRef.excludedFields[0]"),
    ({"router": {"tls": {}}}, "spec.router.tls needs exactly one of secretName and issuerRef"),
    ({"router": {"tls": {"secretName": "a", "issuerRef": {"name": "b"}}}}, "spec.router.tls needs exactly one of secretName and issuerRef"),
    ({"router": {"tls": {"secretName": "a", "dnsNames": ["b"]}}}, "spec.router.tls.dnsNames are put into the certificate of issuerRef"),
    (
        {"router": {"tls": {"secretName": "a"}}, "routing": {"forwardingMode": "Redirect"}},
        "forwardingMode Redirect sends clients to workers",
    ),
    ({"router": {"autoscaling": {"maxReplicas": 1}}}, "spec.router.autoscaling.maxReplicas must be at least spec.routing.replicas"),
    (
        {"scaling": {"maxReplicas": 2, "schedules": [{"name": "a", "start": "0 8 * * *", "end": "0 9 * * *", "minReplicas": 3}]}},
        "spec.scaling.schedules: minReplicas must be at most spec.scaling.maxReplicas",
    ),
    (
        {"scaling": {"maxReplicas": 2, "schedules": [{"name": "a", "start": "0 8 * *", "end": "0 9 * * *", "minReplicas": 1}]}},
        "spec.scaling.schedules[0].start",
    ),
    ({"model": {"region": "eu-1"}}, "spec.model.region needs an s3:// model"),
    ({"model": {"uri": "gs://models/a", "region": "eu-1"}}, "spec.model.region needs an s3:// model"),
    ({"model": {"uri": "oci://a/b:1", "endpoint": "https://x"}}, "spec.model.endpoint needs an hf://"),
    ({"scaling": {"minReplicas": 5, "maxReplicas": 2}}, "spec.scaling.minReplicas must be at most spec.scaling.maxReplicas"),
    ({"scaling": {"maxReplicas": 2, **TARGET}, "replicas": 2}, "spec.replicas and spec.scaling.target both set"),
    ({"scaling": {"maxReplicas": 2, "target": {"ttftMilliseconds": 0}}}, "spec.scaling.target.ttftMilliseconds"),
    ({"scaling": {"maxReplicas": 2, **TARGET, "idleTimeoutSeconds": 60}}, "spec.scaling.idleTimeoutSeconds scales to zero"),
    ({"scaling": {"minReplicas": 0, "maxReplicas": 2, "idleTimeoutSeconds": 60}}, "spec.scaling.idleTimeoutSeconds scales to zero"),
    ({"scaling": {"minReplicas": 0, "maxReplicas": 2, **TARGET, "idleTimeoutSeconds": 90000}}, "spec.scaling.idleTimeoutSeconds"),
    (
        {"scaling": {"maxReplicas": 2, "scaleDown": {"stabilizationWindowSeconds": 60}}},
        "spec.scaling.scaleDown configures the operator's autoscaler",
    ),
    (
        {"scaling": {"maxReplicas": 2, **TARGET, "scaleDown": {"stabilizationWindowSeconds": 7200}}},
        "spec.scaling.scaleDown.stabilizationWindowSeconds",
    ),
    ({"engine": {"tensorParallel": 2}, "resources": {"gpus": 4}}, "spec.engine.tensorParallel must equal spec.resources.gpus"),
    ({"engine": {"tensorParallel": 2}, "resources": {"gpus": 0}}, "spec.engine.tensorParallel must equal spec.resources.gpus"),
    ({"engine": {"tensorParallel": 16, "nodes": 2}, "resources": {"gpus": 16}}, "must equal spec.resources.gpus times spec.engine.nodes"),
    ({"engine": {"tensorParallel": 9, "nodes": 2}}, "spec.engine.tensorParallel must be a multiple of spec.engine.nodes"),
    ({"engine": {"nodes": 2}}, "spec.engine.tensorParallel must be a multiple of spec.engine.nodes"),
    (
        {"engine": {"tensorParallel": 16, "nodes": 2}, "rollout": {"canary": {}}},
        "spec.rollout.canary does not support workers of several pods",
    ),
    (
        {"engine": {"kvCache": {"pageTokens": 16, "blockTokens": 40}}},
        "spec.engine.kvCache.blockTokens must be a multiple of spec.engine.kvCache.pageTokens",
    ),
    ({"engine": {"kvCache": {"size": "1Gi", "pages": 4}}}, "keep one of the two"),
    ({"engine": {"kvCache": {"dtype": "fp8"}}}, "Auto"),
    ({"engine": {"maxModelLen": 8}}, "spec.engine.maxModelLen must be at least"),
    ({"engine": {"dtype": "Int3"}}, 'spec.engine.dtype: Unsupported value: "Int3"'),
    (
        {"engine": {"speculativeDecoding": {"method": "Draft"}}},
        "spec.engine.speculativeDecoding.draftModelURI is required for method Draft",
    ),
    (
        {"engine": {"speculativeDecoding": {"method": "NGram", "draftModelURI": "hf://a/b"}}},
        "spec.engine.speculativeDecoding.draftModelURI is required for method Draft",
    ),
    (
        {"engine": {"speculativeDecoding": {"method": "Draft", "draftModelURI": "s4://x/y"}}},
        "spec.engine.speculativeDecoding.draftModelURI must be hf://ORG/NAME",
    ),
    ({"engine": {"quantization": "Int8"}, "resources": {"gpus": 1}}, "spec.engine.quantization Int8 is for workers on CPUs"),
    ({"engine": {"quantization": "FP8"}, "resources": {"gpus": 0}}, "spec.engine.quantization FP8 is for workers on GPUs"),
    ({"rollout": {"drainTimeoutSeconds": 10800}}, "spec.rollout.drainTimeoutSeconds"),
    ({"rollout": {"drainTimeoutSeconds": "2m"}}, "spec.rollout.drainTimeoutSeconds"),
    ({"rollout": {"progressDeadlineSeconds": 1}}, "spec.rollout.progressDeadlineSeconds"),
    (
        {"rollout": {"surgeTimeoutSeconds": 120, "progressDeadlineSeconds": 60}},
        "spec.rollout.surgeTimeoutSeconds must be at most spec.rollout.progressDeadlineSeconds",
    ),
    ({"rollout": {"strategy": "Recreate"}}, "spec.rollout.strategy"),
    *(
        ({"rollout": {"canary": {name: value}}}, f"spec.rollout.canary.{name}")
        for name, value in (
            ("trafficPercent", 0),
            ("trafficPercent", 100),
            ("analysisSeconds", "10m"),
            ("promotion", "Forever"),
            ("maxErrorRateIncrease", "1.5"),
            ("maxTTFTIncrease", "-1%"),
            ("promotedRevision", "Not A Revision"),
            ("retryToken", "a b"),
        )
    ),
    ({"exposure": {"networkPolicy": "None", "fromNamespaces": ["a"]}}, "spec.exposure.fromNamespaces is enforced by NetworkPolicies"),
    ({"model": {"uri": "s3://Bad_Bucket/x"}}, "spec.model.uri must be hf://"),
    ({"routing": {"image": ""}}, "spec.routing.image"),
    ({"slo": {"classes": [{"name": "Chat"}]}}, "spec.slo.classes"),
    ({"slo": {"classes": [{"name": "chat", "ttftMilliseconds": 0}]}}, "ttftMilliseconds"),
    ({"rollout": {"revision": "yesterday's"}}, "spec.rollout.revision"),
    ({"replicas": -1}, "spec.replicas"),
    ({"resources": {"memory": "lots"}}, "spec.resources.memory"),
    ({"routing": {"policy": "Best"}}, "spec.routing.policy"),
    ({"routing": {"indexMode": "mirror"}}, 'spec.routing.indexMode: Unsupported value: "mirror"'),
    ({"routing": {"indexMode": "Remote", "policy": "Random"}}, "spec.routing.indexMode configures policy PrefixAware"),
    (
        {"routing": {"forwardingMode": "Redirect"}, "access": {"keysSecretRef": {"name": "k"}}},
        "spec.routing.forwardingMode Redirect sends clients to workers",
    ),
    ({"slo": {}, "routing": {"forwardingMode": "Redirect"}}, "spec.routing.forwardingMode Redirect sends clients to workers"),
    ({"slo": {"classes": [{"name": "chat"}], "defaultClass": "caht"}}, "spec.slo.defaultClass must be batch or a name in spec.slo.classes"),
    ({"slo": {"classes": [{"name": "a", "ttftMillisecondsPerThousandTokens": 5}]}}, "needs ttftMilliseconds: add it"),
    ({"slo": {"classes": [{"name": "a"}, {"name": "a"}]}}, "spec.slo.classes"),
    ({"slo": {"classes": [{"name": "a", "priority": 1001}]}}, "priority"),
    ({"engine": {"nonsense": 1}}, 'unknown field "spec.engine.nonsense"'),
    ({"podTemplate": {"specs": {}}}, 'unknown field "spec.podTemplate.specs"'),
    ({"engine": {"runtime": "TGI"}}, "spec.engine.runtime"),
    ({"engine": {"env": [{"name": "A"}]}}, "spec.engine.env: each variable needs exactly one of value and valueFrom"),
    ({"engine": {"env": [{"name": "A", "value": "", "valueFrom": {"fieldRef": {}}}]}}, "each variable needs exactly one of value and"),
    ({"engine": {"runtime": "VLLM"}, "model": {"uri": "s3://models/a"}}, "spec.model.uri of runtime VLLM and SGLang must be an hf://"),
    (
        {"engine": {"runtime": "VLLM"}, "model": {"uri": "hf://a/b/c.gguf@v1"}},
        "spec.model.uri of runtime VLLM and SGLang must not name a .gguf file",
    ),
    ({"model": {"uri": "hf://a/b/c.safetensors"}}, "spec.model.uri must be hf://ORG/NAME[/FILE.gguf][@REVISION]"),
    (
        {"engine": {"runtime": "VLLM"}, "model": {"adapters": [{"name": "a", "uri": "hf://a/b@v1"}]}},
        "spec.model.adapters of runtime VLLM must be hf://ORG/NAME without @REVISION",
    ),
    (
        {"engine": {"runtime": "SGLang"}, "model": {"adapters": [{"name": "a", "uri": "hf://a/b"}]}},
        "spec.model.adapters is not for runtime SGLang",
    ),
    ({"engine": {"runtime": "SGLang"}, "access": {"keysSecretRef": {"name": "k"}}}, "spec.access is not for runtime SGLang"),
    *(({"engine": {"runtime": runtime, **unsupported_setting(one.field)}}, one.message) for one in UNSUPPORTED for runtime in one.runtimes),
]


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=[json.dumps(spec) for spec, _ in REFUSED])
def test_refused_with_a_message_that_names_the_field(server: apiserver.ApiServer, spec: dict, words: str) -> None:
    with pytest.raises(apiserver.Refused) as refused:
        check(server, **spec)
    assert words in str(refused.value)


ACCEPTED = [
    {"engine": {"tensorParallel": 2}},
    {"engine": {"tensorParallel": 2}, "resources": {"gpus": 2}},
    {"engine": {"tensorParallel": 16, "nodes": 2}},
    {"engine": {"tensorParallel": 16, "nodes": 2}, "resources": {"gpus": 8}},
    {"resources": {"gpus": 0, "cpu": "500m", "memory": "2Gi"}},
    {"resources": {"gpus": 0, "cpu": "100n", "memory": "1E3"}},
    {"resources": {"gpuResource": "amd.com/gpu", "gpuType": "AMD_Instinct_MI300X_OAM"}, "engine": {"tensorParallel": 8}},
    {"resources": {"gpuResource": "nvidia.com/mig-1g.10gb", "gpus": 1}},
    {"resources": {"gpus": 4, "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h100"}]}, "engine": {"tensorParallel": 4}},
    {"resources": {"gpus": 0}, "engine": {"quantization": "Int8"}},
    {"engine": {"quantization": "Int4"}, "resources": {"gpus": 1}},
    {"engine": {"quantization": "Int4"}, "resources": {"gpus": 0}},
    {"engine": {"quantization": "FP8"}, "resources": {"gpus": 1}},
    {"engine": {"itlTargetMilliseconds": 30}},
    {"engine": {"speculativeDecoding": {"method": "NGram"}}},
    {"engine": {"speculativeDecoding": {"method": "Draft", "draftModelURI": "pvc://models/draft"}}},
    {"scaling": {"maxReplicas": 4}, "replicas": 9},
    {
        "scaling": {
            "minReplicas": 0,
            "maxReplicas": 4,
            "target": {"ttftMilliseconds": 1500},
            "idleTimeoutSeconds": 600,
            "scaleDown": {"stabilizationWindowSeconds": 0},
        }
    },
    {"routing": {"indexMode": "Mirror", "holdTimeoutSeconds": 0}, "access": {"keysSecretRef": {"name": "k", "key": "x"}}},
    {"slo": {"classes": [{"name": "chat", "priority": -5, "ttftMilliseconds": 500, "itlMilliseconds": 50}], "defaultClass": "batch"}},
    {"slo": {"defaultClass": "batch"}},
    {"routing": {"indexMode": "Remote", "forwardingMode": "Redirect", "metricsNames": "VLLM"}},
    {"model": {"uri": "pvc://models/qwen/8b"}},
    {"model": {"uri": "file:///models/tiny"}},
    {"model": {"uri": "gs://models_eu/tiny", "secretRef": {"name": "gcs", "key": "key.json"}, "endpoint": "https://storage.corp"}},
    {"model": {"uri": "hf://a/b", "endpoint": "https://hub.corp"}},
    {"model": {"cache": {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}}, "replicas": 0},
    {"model": {"name": "m", "adapters": [{"name": "qwen", "uri": "hf://a/b@main"}, {"name": "org/sql", "uri": "pvc://models/sql"}]}},
    {
        "model": {
            "revision": "9c925d64d72725edaf899c6cb9c377fd0709d9c5",
            "secretRef": {"name": "hub"},
            "cache": {"persistentVolumeClaim": {"claimName": "models"}},
        }
    },
    {"model": {"uri": "hf://a/b/quants/c.Q4_K_M.gguf", "revision": "v1"}},
    {"model": {"uri": "s3://models/qwen", "endpoint": "http://minio:9000", "region": "eu-1", "cache": {"emptyDir": {"sizeLimit": "9Gi"}}}},
    {"model": {"uri": "oci://ghcr.io/org/qwen:1.0#8b"}},
    {"resources": {"gpuType": "NVIDIA-H100-80GB-HBM3"}, "imagePullSecrets": [{"name": "registry"}], "engine": {"warmupTokens": 0}},
    {"batch": {"storageURI": "pvc://batches"}},
    {"batch": {"storageURI": "s3://batches/chat", "secretName": "keys", "maxConcurrency": 4096}},
    {"rollout": {"drainTimeoutSeconds": 0}},
    {"rollout": {"strategy": "DrainFirst", "surgeTimeoutSeconds": 0, "paused": True, "progressDeadlineSeconds": 30}},
    {"rollout": {"revision": "qwen-worker-c51d9689d7", "progressDeadlineSeconds": 30}},
    {
        "engine": {
            "runtime": "VLLM",
            "image": "vllm/vllm-openai:mine",
            "args": ["--gpu-memory-utilization=0.9"],
            "env": [{"name": "A", "value": ""}, {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "kvCache": {"size": "20Gi", "dtype": "FP8", "pageTokens": 32, "blockTokens": 64},
            "quantization": "FP8",
            "schedulingPolicy": "FirstComeFirstServed",
            "tensorParallel": 4,
        },
        "model": {"adapters": [{"name": "a", "uri": "hf://a/b"}]},
    },
    {"engine": {"runtime": "SGLang", "schedulingPolicy": "LongestPrefixMatch", "chunkedPrefillSize": 2048}},
    {"podTemplate": {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [{"operator": "Exists"}], "anything": {"goes": 1}}}},
]


@pytest.mark.parametrize("spec", ACCEPTED, ids=json.dumps)
def test_accepted(server: apiserver.ApiServer, spec: dict) -> None:
    made = check(server, **spec)
    for key, value in spec.items():
        if key not in ("replicas", "podTemplate", "scaling", "model", "imagePullSecrets"):
            assert value.items() <= made["spec"][key].items()
    assert "podTemplate" not in spec or made["spec"]["podTemplate"]["spec"] == spec["podTemplate"]["spec"]


@pytest.mark.parametrize("name", ["9lives", "a" * 53])
def test_invalid_names_are_refused(server: apiserver.ApiServer, name: str) -> None:
    with pytest.raises(apiserver.Refused, match=r"metadata\.name must be at most 52"):
        check(server, name)


def test_kubectl_apply_refuses_unknown_fields_and_prints_columns(server: apiserver.ApiServer, namespace: str) -> None:
    if apiserver.program("kubectl") is None:
        pytest.skip("kubectl not found: run `make kubernetes` once")
    wrong = yaml.safe_dump(manifest("qwen", namespace, replica=3))
    refused = server.kubectl("apply", "-f", "-", stdin=wrong)
    assert refused.returncode != 0 and 'unknown field "spec.replica"' in refused.stderr
    applied = server.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest("qwen", namespace)))
    assert applied.returncode == 0, applied.stderr
    table = server.kubectl("get", "infer", "-n", namespace)
    assert table.stdout.split("\n")[0].split() == ["NAME", "MODEL", "DESIRED", "READY", "REASON", "URL", "AGE"], table
    described = server.kubectl("explain", "infer.spec.engine.kvCache")
    assert "blockTokens" in described.stdout and "unit of the prefix index" in described.stdout


def test_a_service_that_no_operator_has_seen_is_not_current(server: apiserver.ApiServer, namespace: str) -> None:
    """kstatus takes an object without a status for one that is current, and Flux would not wait for it."""
    server.create(BASE.format(namespace), manifest("qwen", namespace))
    body = server.get(f"{BASE.format(namespace)}/qwen")
    assert body["status"] == {"observedGeneration": -1} and body["metadata"]["generation"] == 1
