"""`fairlead migrate`: Helm values of production-stack."""

import pytest
from tests.cli.migrate.samples import VALUES, load, migrate, only

from fairlead.migrate.command import convert


def test_each_model_becomes_the_pod_that_the_chart_makes() -> None:
    (llama, qwen), messages = migrate(VALUES)
    spec = llama["spec"]
    assert llama["metadata"] == {"name": "llama", "labels": {"team": "a"}}
    assert spec["model"] == {
        "uri": "hf://org/llama",
        "name": "org/llama",
        "revision": "main",
        "secretRef": {"name": "hub", "key": "key"},
        "adapters": [{"name": "sql", "uri": "hf://org/sql"}],
    }
    assert spec["scaling"]["maxReplicas"] == 4
    assert spec["resources"] == {"cpu": "8", "memory": "32Gi", "gpuResource": "amd.com/gpu", "gpus": 2}
    switches = ["--enable-lora", "--enable-auto-tool-choice"]
    assert spec["engine"] == {
        "runtime": "VLLM",
        "image": "vllm/vllm-openai:v0.33.0",
        "maxModelLen": 4096,
        "tensorParallel": 2,
        "args": [*switches, "--tool-call-parser=llama3_json", "--gpu-memory-utilization=0.8", "--seed=1"],
        "env": [{"name": "LOG", "value": "1"}, {"name": "LEVEL", "value": "2"}],
    }
    routing = {"policy": "Session", "args": ["--session-header=x-user-id"], "replicas": 3, "metricsNames": "VLLM"}
    assert spec["routing"] == routing == qwen["spec"]["routing"]
    pod = spec["podTemplate"]["spec"]
    assert spec["podTemplate"]["metadata"] == {"labels": {"tier": "gpu"}} and spec["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["runtimeClassName"] == "nvidia" and [one["key"] for one in pod["tolerations"]] == ["gpu", "model"]
    assert pod["affinity"]["nodeAffinity"] and [one["name"] for one in pod["volumes"]] == ["shm", "logs"]
    (engine,) = pod["initContainers"]
    assert engine["envFrom"] == [{"secretRef": {"name": "s3"}}] and engine["volumeMounts"] == [{"name": "logs", "mountPath": "/logs"}]

    assert qwen["spec"]["model"]["cache"] == {"persistentVolumeClaim": {"claimName": "weights"}}
    assert qwen["spec"]["resources"] == {"cpu": "3", "gpus": 1} and qwen["spec"]["engine"]["image"] == "vllm/vllm-openai"
    assert qwen["spec"]["podTemplate"]["spec"] == {"tolerations": [{"key": "own"}]}
    for name in (
        *("pvcStorage", "storageClass", "lmcacheConfig", "chatTemplate", "initContainer", "requestGPUMem", "limitCPU", "replicaCount"),
        *("keda.cooldownPeriod", "vllmConfig.enablePrefixCaching", "vllmConfig.pipelineParallelSize", "extraVolumes[1]"),
    ):
        assert f"production-stack llama: servingEngineSpec.modelSpec.{name}" in messages, name
    for listed in ("servingEngineSpec.vllmApiKey (not shown)", "servingEngineSpec.strategy", "routerSpec.ingress"):
        assert f"production-stack llama: {listed}" in messages and f"production-stack qwen: {listed}" in messages, listed
    for listed in ("modelSpec.hf_token (not shown)", "modelSpec.requestGPU 1: resources or affinity", "cacheserverSpec", "loraAdapters[1]"):
        assert listed in messages.partition("production-stack qwen")[2], listed
    assert "production-stack idle: left out" in messages and "one URL serves all models" in messages
    assert not any(secret in messages for secret in ("secret-value", "hf_plain", "hf_c"))


def test_a_model_on_the_claim_of_the_values_is_found() -> None:
    made, _ = only(
        "servingEngineSpec: {modelSpec: [{name: a, modelURL: /data/m, pvcStorage: 1Gi, pvcExistingClaimName: w, requestGPU: '1'}]}"
    )
    assert made["spec"]["model"]["uri"] == "pvc://w/m" and made["spec"]["resources"] == {"gpus": 1}
    made, _ = only("servingEngineSpec: {modelSpec: [{name: a, modelURL: o/m, pvcStorage: {emptyDir: {sizeLimit: 9Gi}}, requestGPU: 1}]}")
    assert made["spec"]["model"]["cache"] == {"emptyDir": {"sizeLimit": "9Gi"}}
    made, _ = only("servingEngineSpec: {modelSpec: [{name: a, modelURL: pvc://w/m, requestGPU: 1}]}")
    assert made["spec"]["model"]["uri"] == "pvc://w/m"


@pytest.mark.parametrize(
    "more",
    [
        "routerSpec: {env: [{name: API_KEY, value: SECRET}]}",
        "routerSpec: {extraArgs: [--api-key, SECRET]}",
        "routerSpec: {extraArgs: [--api-key=SECRET]}",
        "routerSpec: {extraArgs: --x --hf-token SECRET}",
        """routerSpec: {x: '{"password": "SECRET"}'}""",
        "routerSpec: {x: [{y: {hf_token: SECRET}}]}",
        "routerSpec: {apiKey: [SECRET]}",
    ],
)
def test_a_value_that_names_a_secret_is_not_shown(more: str) -> None:
    model = "name: a, modelURL: o/a, requestGPU: 1"
    result = convert(load(f"servingEngineSpec: {{modelSpec: [{{{model}, lmcacheConfig: {{password: SECRET}}}}]}}\n{more}"))
    written = "\n".join([*result.messages, *result.documents])
    assert "SECRET" not in written and "lmcacheConfig (not shown)" in written and "routerSpec" in written


@pytest.mark.parametrize("header", ["", "Authorization", "x user"])
def test_a_session_header_that_the_router_refuses_is_left_out(header: str) -> None:
    router = f"routerSpec: {{routingLogic: session, sessionKey: '{header}'}}"
    made, messages = only(f"servingEngineSpec: {{modelSpec: [{{name: a, modelURL: o/a, requestGPU: 1}}]}}\n{router}")
    assert made["spec"]["routing"] == {"policy": "Session", "metricsNames": "VLLM"}
    assert "routerSpec.sessionKey" in messages and "it reads x-session-id" in messages


@pytest.mark.parametrize("empty", ["{}", "null"])
def test_an_empty_entry_is_named_without_the_others(empty: str) -> None:
    entry = "{name: b, modelURL: o/b, requestGPU: 1, hf_token: SECRET}"
    result = convert(load(f"servingEngineSpec: {{modelSpec: [{empty}, {entry}]}}"))
    assert len(result.documents) == 1 and "SECRET" not in "\n".join(result.messages)
    assert result.messages[0] == "production-stack values: not migrated: servingEngineSpec.modelSpec has an empty entry: fill or remove it"


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("modelURL: o/m, raySpec: {enabled: true}", "raySpec: a replica has several pods"),
        ("modelURL: /data/m, pvcStorage: 1Gi", "RELEASE-a-storage-claim: name it in pvcExistingClaimName"),
        ("modelURL: /data/shared-pvc-storage/m, pvcExistingClaimName: w", "write it as pvc://RELEASE-shared-pvc-storage-claim/PATH"),
        ("modelURL: o/m, requestGPU: 0.5", "servingEngineSpec.modelSpec.requestGPU 0.5: workers have whole GPUs"),
        ("replicaCount: 1", "no field names a model"),
        ("modelURL: o/m, env: 3", "servingEngineSpec.modelSpec.env must be a list of mappings (got 3)"),
        ("modelURL: o/m, requestMemory: 32GB", "(from servingEngineSpec.modelSpec.requestMemory)"),
    ],
)
def test_one_model_that_cannot_be_migrated_leaves_the_others(entry: str, words: str) -> None:
    result = convert(load(f"servingEngineSpec: {{modelSpec: [{{name: a, {entry}}}, {{name: b, modelURL: o/b, requestGPU: 1}}]}}"))
    assert len(result.documents) == 1 and words in result.messages[0], result.messages
