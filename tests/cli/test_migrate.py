"""`fairlead migrate`: each field of a source is in the result or listed, with the reason; the result is valid; nothing is silent."""

import io
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support.manifests import SETTINGS

from fairlead.main import main
from fairlead.migrate.command import convert
from fairlead_operator.api import InferenceService
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed

Body = dict[str, Any]


def load(text: str) -> list[Body]:
    return list(yaml.safe_load_all(text))


def migrate(text: str) -> tuple[list[Body], str]:
    """Return the InferenceServices of a source, which are valid, and the messages."""
    result = convert(load(text))
    made = [next(yaml.safe_load_all(one)) for one in result.documents]
    for one in made:
        InferenceService.parse(one)
    return made, "\n".join(result.messages)


def only(text: str) -> tuple[Body, str]:
    (made,), messages = migrate(text)
    return made, messages


DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata:
  name: qwen
  namespace: llm
  labels: {team: search, app.kubernetes.io/managed-by: Helm}
  resourceVersion: "7"
spec:
  replicas: 2
  strategy: {type: Recreate}
  selector: {matchLabels: {app: qwen}}
  template:
    metadata:
      labels: {app: qwen, tier: gpu}
      annotations: {example.com/note: a}
    spec:
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-L4, pool: a}
      tolerations: [{key: gpu, operator: Exists}]
      serviceAccountName: reader
      imagePullSecrets: [{name: registry}]
      terminationGracePeriodSeconds: 90
      containers:
      - name: log
        image: log:1
        volumeMounts: [{name: logs, mountPath: /logs}]
      - name: vllm
        image: vllm/vllm-openai:v0.33.0
        args: [--model=Qwen/Qwen3-8B, --served-model-name, qwen, q, --max_model_len, 32k, --dtype=half, --port=8000, --api-key=sk-secret,
               --tensor-parallel-size, "2", --enable-auto-tool-choice, --chat-template=/chat/t.jinja, --max-num-batched-token=4096,
               --lora-modules, a=org/a, '{"name":"b","path":"/models/b"}', --kv-cache-dtype=fp8, --enable-chunked-prefill=False]
        env:
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
        - {name: VLLM_API_KEY, valueFrom: {secretKeyRef: {name: keys, key: k}}}
        - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: LEVEL, value: 3}
        envFrom: [{configMapRef: {name: more}}]
        livenessProbe: {httpGet: {path: /health, port: 8000}}
        resources:
          requests: {cpu: 4, memory: 16Gi}
          limits: {cpu: 8, memory: 64Gi, nvidia.com/gpu: "2", ephemeral-storage: 9Gi}
        volumeMounts:
        - {name: cache, mountPath: /root/.cache/huggingface}
        - {name: models, mountPath: /models, subPath: llm}
        - {name: tmp, mountPath: /chat}
        - {name: shm, mountPath: /dev/shm}
      volumes:
      - {name: cache, persistentVolumeClaim: {claimName: hub-cache}}
      - {name: models, persistentVolumeClaim: {claimName: weights}}
      - {name: tmp, configMap: {name: templates}}
      - {name: shm, emptyDir: {medium: Memory, sizeLimit: 4Gi}}
      - {name: logs, emptyDir: {}}
      - {name: unused, emptyDir: {}}
"""


def test_a_deployment_keeps_every_field_that_an_inference_service_has() -> None:
    made, messages = only(DEPLOYMENT)
    assert made["metadata"] == {"name": "qwen", "namespace": "llm", "labels": {"team": "search"}}
    spec = made["spec"]
    assert spec["model"] == {
        "uri": "hf://Qwen/Qwen3-8B",
        "secretRef": {"name": "hub", "key": "token"},
        "cache": {"persistentVolumeClaim": {"claimName": "hub-cache"}},
        "adapters": [{"name": "a", "uri": "hf://org/a"}, {"name": "b", "uri": "pvc://weights/llm/b"}],
    }
    assert spec["engine"] == {
        "runtime": "VLLM",
        "image": "vllm/vllm-openai:v0.33.0",
        "maxModelLen": 32000,
        "maxPrefillTokens": 4096,
        "chunkedPrefill": "Disabled",
        "dtype": "Float16",
        "tensorParallel": 2,
        "kvCache": {"dtype": "FP8"},
        "args": ["--enable-auto-tool-choice", "--chat-template=/chat/t.jinja"],
        "env": [{"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, {"name": "LEVEL", "value": "3"}],
    }
    assert spec["resources"] == {"gpuType": "NVIDIA-L4", "cpu": "4", "memory": "64Gi", "gpus": 2}
    assert spec["replicas"] == 2 and spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["podTemplate"]["metadata"] == {"labels": {"tier": "gpu"}, "annotations": {"example.com/note": "a"}}
    pod = spec["podTemplate"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a"} and pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert [one["name"] for one in pod["containers"]] == ["log"]
    assert pod["initContainers"] == [
        {
            "name": "engine",
            "envFrom": [{"configMapRef": {"name": "more"}}],
            "resources": {"limits": {"ephemeral-storage": "9Gi"}},
            "volumeMounts": [{"name": "own-tmp", "mountPath": "/chat"}],
        }
    ], "a volume with a name of the operator's gets another"
    assert {"name": "own-tmp", "configMap": {"name": "templates"}} in pod["volumes"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in pod["volumes"]
    for listed in (
        "spec.strategy",
        "spec.template.metadata.labels.app",
        "spec.template.spec.serviceAccountName",
        "spec.template.spec.terminationGracePeriodSeconds 90",
        '--served-model-name ["q"]',
        "--port",
        "--api-key (not shown)",
        "env[1] VLLM_API_KEY",
        "livenessProbe",
        "limits.cpu 8",
        "requests.memory",
        "spec.template.spec.volumes[5]",
    ):
        assert listed in messages, listed
    assert "sk-secret" not in messages and "resourceVersion" not in messages


def container(command: str, more: str = "") -> str:
    body = load(DEPLOYMENT)[0]
    pod = body["spec"]["template"]["spec"]
    found = {"name": "vllm", "image": "registry/serve:1", "resources": {"limits": {"nvidia.com/gpu": 1}}, **yaml.safe_load(command)}
    return yaml.safe_dump(
        body | {"spec": {**body["spec"], "template": {"spec": {**pod, "containers": [found], **yaml.safe_load(more or "{}")}}}}
    )


@pytest.mark.parametrize(
    "command",
    [
        "{command: [vllm, serve, org/m], args: [--max-num-seqs, '9', --seed=1]}",
        "{command: [/opt/venv/bin/vllm, serve], args: [org/m, --max_num_seqs=9, --seed=1]}",
        "{command: [python3, -m, vllm.entrypoints.openai.api_server, --model, org/m, --max-num-seqs=9, --seed=1]}",
        "{command: [sh, -c], args: ['exec vllm serve org/m --max-num-seqs 9 --seed=1']}",
        yaml.safe_dump(
            {
                "command": ["/bin/bash", "-lc", 'export N=9; vllm serve "$M" --max-num-seqs ${N} \\\n  --seed=${S:-1}'],
                "env": [{"name": "M", "value": "org/m"}],
            }
        ),
        yaml.safe_dump(
            {
                "command": ["bash", "-c", "set -e\n# vLLM\nsleep 1 && exec vllm serve org/m $FLAGS 2>&1 | tee /tmp/log"],
                "env": [{"name": "FLAGS", "value": "--max-num-seqs=9 --seed=1"}],
            }
        ),
        "{command: [vllm, serve], args: [$(M), --max-num-seqs=$(N), --seed=1], env: [{name: M, value: org/m}, {name: N, value: '9'}]}",
        "{image: vllm/vllm-openai:v1, args: [serve, org/m, --max-num-seqs=9, --seed=1]}",
        "{args: [--model, org/m, --max-num-seqs=9, --seed=1]}",
    ],
)
def test_every_spelling_of_the_command_line_gives_the_same(command: str) -> None:
    made, messages = only(container(command))
    spec = made["spec"]
    assert (spec["model"]["uri"], spec["model"]["name"]) == ("hf://org/m", "org/m")
    assert (spec["engine"]["maxNumSeqs"], spec["engine"]["args"]) == (9, ["--seed=1"])
    assert ("sleep 1" in messages) == ("sleep" in command), "other commands of a script are listed"


@pytest.mark.parametrize(
    ("flags", "gpus", "engine", "replicas"),
    [
        ("--tensor-parallel-size=2", 2, {"tensorParallel": 2}, 2),
        ("-tp 2 -pp 2", 4, {"tensorParallel": 4}, 2),
        ("--pipeline_parallel_size 4", 4, {"tensorParallel": 4}, 2),
        ("--data-parallel-size=4", 4, {}, 8),
        ("--tensor-parallel-size=2 --data-parallel-size=2", 4, {"tensorParallel": 2}, 4),
        ("--seed=1", 2, {}, 2),
    ],
)
def test_degrees_of_parallelism_become_gpus_and_replicas(flags: str, gpus: int, engine: Body, replicas: int) -> None:
    made, messages = only(
        container(f"{{command: [sh, -c, 'vllm serve org/m {flags}'], resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}}}")
    )
    spec = made["spec"]
    assert {key: value for key, value in spec["engine"].items() if key in ("tensorParallel", "nodes")} == engine
    assert spec["resources"]["gpus"] == engine.get("tensorParallel", 1) and spec["replicas"] == replicas
    assert ("parallel" in flags or "p 2" in flags) or "a replica uses 1" in messages


def test_a_leader_worker_set_over_nodes_runs_fairleads_engine() -> None:
    leader = load(
        container("{command: [sh, -c, 'ray start; vllm serve org/m --tensor-parallel-size 8 --pipeline-parallel-size 2 --seed=1']}")
    )[0]
    template = {"spec": {**leader["spec"]["template"]["spec"]}}
    template["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 8}}
    body = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "big"},
        "spec": {"replicas": 1, "leaderWorkerTemplate": {"size": 2, "leaderTemplate": template, "workerTemplate": template}},
    }
    made, messages = only(yaml.safe_dump(body))
    assert made["spec"]["engine"] == {"runtime": "Fairlead", "tensorParallel": 16, "nodes": 2} and made["spec"]["resources"]["gpus"] == 8
    for listed in ("spans 2 pods", "no pipeline parallelism", "--seed=1", "ray start", "image", "workerTemplate"):
        assert listed in messages, listed


@pytest.mark.parametrize(
    ("volume", "path", "uri"),
    [
        ("persistentVolumeClaim: {claimName: w}", "/m/x", "pvc://w/sub/x"),
        ("persistentVolumeClaim: {claimName: w}", "/m", "pvc://w/sub"),
        ("image: {reference: 'reg/model:1'}", "/m/x", "oci://reg/model:1#sub/x"),
        ("hostPath: {path: /data}", "/m/x", "file:///m/x"),
        ("emptyDir: {}", "/elsewhere", "file:///elsewhere"),
    ],
)
def test_a_model_on_a_volume_is_found(volume: str, path: str, uri: str) -> None:
    mounts = f"volumeMounts: [{{name: v, mountPath: /m, subPath: sub}}], command: [vllm, serve, {path}, --served-model-name=x]"
    made, _ = only(container(f"{{{mounts}}}", f"volumes: [{{name: v, {volume}}}]"))
    assert made["spec"]["model"]["uri"] == uri
    assert ("volumes" in made["spec"]["podTemplate"]["spec"]) == uri.startswith("file:"), "a volume that the URI names is not mounted twice"


SERVICE = "{apiVersion: v1, kind: Service, metadata: {name: qwen, namespace: llm}, spec: {selector: {app: qwen}}}"
HPA = """
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: h, namespace: llm}
spec: {minReplicas: 2, maxReplicas: 6, scaleTargetRef: {kind: Deployment, name: qwen}, metrics: [{type: Pods}]}
"""
KEDA = """
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: k, namespace: llm}
spec: {minReplicaCount: 0, maxReplicaCount: 3, scaleTargetRef: {name: qwen}, triggers: [{type: prometheus}]}
"""


@pytest.mark.parametrize(("scaler", "bounds", "metric"), [(HPA, (2, 6), "Pods"), (KEDA, (0, 3), "prometheus")])
def test_service_and_autoscaler_of_a_deployment_are_read_with_it(scaler: str, bounds: tuple[int, int], metric: str) -> None:
    made, messages = only(f"{DEPLOYMENT}\n---\n{SERVICE}\n---\n{scaler}")
    assert made["metadata"]["name"] == "qwen-fairlead" and "Service qwen exists" in messages
    scaling = made["spec"]["scaling"]
    assert (scaling["minReplicas"], scaling["maxReplicas"]) == bounds and scaling["target"] and "replicas" not in made["spec"]
    assert f"it scaled by {metric}: delete it" in messages


LLM = """
apiVersion: serving.kserve.io/VERSION
kind: LLMInferenceService
metadata: {name: llama, annotations: {serving.kserve.io/x: y, serving.kserve.io/exp-dra-device-count: "2"}}
spec:
  model:
    uri: hf://org/llama
    name: org/llama
    lora: {adapters: [{name: a, uri: "hf://org/a"}], maxRank: 32}
  replicas: 2
  parallelism: {tensor: 2}
  labels: {team: a}
  baseRefs: [{name: base}]
  prefill: {replicas: 3}
  router:
    route: {}
    gateway: {refs: [{name: public, namespace: infra}]}
    scheduler: {config: {inline: {kind: EndpointPickerConfig}}}
  template:
    tolerations: [{key: gpu, operator: Exists}]
    containers:
    - name: main
      image: ghcr.io/llm-d/llm-d:v1
      env:
      - name: VLLM_ADDITIONAL_ARGS
        value: --block-size 64 --kv-events-config '{"publisher":"zmq"}' --kv_transfer_config '{"kv_role":"kv_consumer"}'
      - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: HF_TOKEN}}}
      resources: {limits: {nvidia.com/gpu: "2", rdma/ib: 1}}
"""


@pytest.mark.parametrize("version", ["v1alpha1", "v1alpha2"])
def test_kserves_llm_inference_service(version: str) -> None:
    made, messages = only(LLM.replace("VERSION", version))
    spec = made["spec"]
    secret = {"name": "hub", "key": "HF_TOKEN"}
    adapters = [{"name": "a", "uri": "hf://org/a"}]
    assert spec["model"] == {"uri": "hf://org/llama", "name": "org/llama", "secretRef": secret, "adapters": adapters}
    engine = {"runtime": "VLLM", "image": "ghcr.io/llm-d/llm-d:v1", "tensorParallel": 2, "args": ["--max-lora-rank=32", "--block-size=64"]}
    assert spec["engine"] == engine and spec["resources"] == {"gpus": 2} and spec["replicas"] == 2
    assert spec["exposure"]["gateway"]["parentRef"] == {"name": "public", "namespace": "infra"}
    assert spec["podTemplate"]["spec"]["initContainers"] == [{"name": "engine", "resources": {"limits": {"rdma/ib": "1"}}}]
    for listed in (
        "spec.prefill",
        "spec.baseRefs",
        "spec.router.route {}",
        "spec.router.scheduler",
        "kv-events-config",
        "kv_transfer_config",
    ):
        assert listed in messages, listed


ISVC = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: llama}
spec:
  predictor:
    minReplicas: 0
    maxReplicas: 4
    scaleTarget: 9
    model:
      modelFormat: {name: huggingface}
      runtime: own
      storageUri: URI
      args: [--model_name=chat, --model_dir=/mnt/models, --backend=vllm, --max-model-len=1024]
      resources: {limits: {nvidia.com/gpu: "2", memory: 48Gi}}
"""


@pytest.mark.parametrize(
    ("uri", "model"),
    [
        ("hf://org/llama:v2", {"uri": "hf://org/llama", "revision": "v2"}),
        ("pvc://claim/llama", {"uri": "pvc://claim/llama"}),
        ("oci://reg/llama:1", {"uri": "oci://reg/llama:1#models"}),
        ("s3://bucket/llama", {"uri": "s3://bucket/llama"}),
        ("gs://bucket/llama", {"uri": "gs://bucket/llama"}),
    ],
)
def test_kserves_inference_service_of_each_storage(uri: str, model: Body) -> None:
    made, messages = only(ISVC.replace("URI", uri))
    spec = made["spec"]
    assert spec["model"] == {**model, "name": "chat"} and spec["scaling"]["maxReplicas"] == 4
    bucket = uri.startswith(("s3", "gs"))
    assert spec["engine"] == {"runtime": "Fairlead" if bucket else "VLLM", "maxModelLen": 1024, "tensorParallel": 2}
    assert ("downloads from buckets" in messages) == bucket
    for listed in ("--backend", "--model_dir", "spec.predictor.scaleTarget 9", "spec.predictor.model.runtime"):
        assert listed in messages, listed


def test_kserves_inference_service_with_a_vllm_container() -> None:
    body = load(ISVC)[0]
    engine: Body = {"name": "kserve-container", "image": "vllm/vllm-openai:v1", "args": ["--model=/mnt/models", "--port=8080"]}
    engine |= {"env": [{"name": "STORAGE_URI", "value": "hf://org/m"}], "resources": {"limits": {"nvidia.com/gpu": 1}}}
    body["spec"]["predictor"] = {"containers": [engine]}
    made, _ = only(yaml.safe_dump(body))
    assert made["spec"]["model"] == {"uri": "hf://org/m"} and made["spec"]["engine"]["image"] == "vllm/vllm-openai:v1"


RUNTIME = """
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: own}
spec:
  supportedModelFormats: [{name: vLLM, autoSelect: true}]
  containers:
  - name: kserve-container
    image: registry/vllm:1
    command: [python, -m, vllm.entrypoints.openai.api_server]
    args: [--port=8080, --model=/mnt/models, "--served-model-name={{.Name}}", --seed=1]
    env: [{name: HF_HOME, value: /tmp/hf}, {name: LEVEL, value: a}]
    livenessProbe: {httpGet: {path: /health}}
  volumes: [{name: unused, emptyDir: {}}]
"""


def test_kserves_serving_runtime_gives_image_and_flags() -> None:
    service = ISVC.replace("URI", "oci://reg/m:1#m").replace("name: huggingface", "name: vLLM")
    service = service.replace("--model_name=chat, --model_dir=/mnt/models, --backend=vllm, ", "")
    made, messages = only(f"{service}---{RUNTIME}")
    env = [{"name": "LEVEL", "value": "a"}]
    engine = {"runtime": "VLLM", "image": "registry/vllm:1", "maxModelLen": 1024, "args": ["--seed=1"], "env": env}
    assert made["spec"]["engine"] == engine and made["spec"]["model"] == {"uri": "oci://reg/m:1#m"}
    for listed in ("--port", "HF_HOME", "ServingRuntime own spec.containers[0].livenessProbe", "ServingRuntime own spec.volumes "):
        assert listed in messages, listed


MODEL = """
apiVersion: kubeai.org/v1
kind: Model
metadata: {name: llama}
spec:
  features: [TextGeneration]
  owner: meta
  url: hf://org/llama
  adapters: [{name: a, url: "hf://org/a"}]
  engine: VLLM
  args: [--max-model-len=8192, --tensor-parallel-size=2]
  env: {NCCL_DEBUG: INFO}
  envFrom: [{secretRef: {name: more}}]
  resourceProfile: nvidia-gpu-l4:2
  cacheProfile: efs
  files: [{path: /t.jinja, content: x}]
  minReplicas: 1
  maxReplicas: 5
  targetRequests: 32
  scaleDownDelaySeconds: 60
  loadBalancing: {strategy: PrefixHash, prefixHash: {meanLoadFactor: 110}}
  priorityClassName: high
"""


def test_kubeais_model() -> None:
    made, messages = only(MODEL)
    spec = made["spec"]
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
    assert spec["podTemplate"]["spec"]["priorityClassName"] == "high"
    for listed in (
        "spec.owner",
        "spec.cacheProfile",
        "spec.files",
        "prefixHash",
        "targetRequests 32",
        "gpuType",
        "spec.envFrom",
        "spec.engine.image",
    ):
        assert listed in messages, listed


def test_kubeais_profiles_and_replicas() -> None:
    profile = "resourceProfiles: {big: {limits: {amd.com/gpu: 1}, requests: {cpu: 500m}, nodeSelector: {pool: b}}}"
    fixed = MODEL.replace("nvidia-gpu-l4:2", "big:2").replace("  minReplicas: 1", "  replicas: 3\n  autoscalingDisabled: true")
    made, messages = only(f"{fixed}\n---\n{profile}")
    spec = made["spec"]
    assert (
        spec["resources"] == {"gpuResource": "amd.com/gpu", "gpus": 2, "cpu": "1000m"} and spec["replicas"] == 3 and "scaling" not in spec
    )
    assert spec["podTemplate"]["spec"]["nodeSelector"] == {"pool": "b"} and "maxReplicas" in messages
    made, messages = only(MODEL.replace("  maxReplicas: 5\n", "").replace("nvidia-gpu-l4:2", "unknown:2"))
    assert "KubeAI has no limit" in messages and 'resourceProfile "unknown:2"' in messages


STACK = """
servingEngineSpec:
  runtimeClassName: nvidia
  tolerations: [{key: gpu, operator: Exists}]
  vllmApiKey: secret-value
  strategy: {type: Recreate}
  modelSpec:
  - name: llama
    repository: vllm/vllm-openai
    tag: v0.33.0
    modelURL: org/llama
    replicaCount: 2
    requestCPU: 8
    requestMemory: 32Gi
    requestGPU: 2
    requestGPUType: amd.com/gpu
    hf_token: {secretName: hub, secretKey: token}
    pvcStorage: 50Gi
    shmSize: 4Gi
    enableTool: true
    toolCallParser: llama3_json
    vllmConfig: {maxModelLen: 4096, tensorParallelSize: 2, enablePrefixCaching: false, gpuMemoryUtilization: 0.8, extraArgs: [--seed, 1]}
    lmcacheConfig: {enabled: true}
    nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [a]}]}]
    tolerations: [{key: model, operator: Exists}]
    keda: {enabled: true, minReplicaCount: 1, maxReplicaCount: 4}
  - {name: qwen, repository: vllm/vllm-openai, modelURL: org/qwen, requestGPU: 1, hf_token: hf_plain, initContainer: {name: i}}
  - {name: off, enabled: false}
routerSpec:
  replicaCount: 3
  routingLogic: session
  sessionKey: x-user-id
  ingress: {enabled: true}
  resources: {requests: {cpu: 400m}}
cacheserverSpec: {replicaCount: 1}
"""


def test_values_of_production_stack() -> None:
    (llama, qwen), messages = migrate(STACK)
    spec = llama["spec"]
    assert spec["model"] == {"uri": "hf://org/llama", "name": "org/llama", "secretRef": {"name": "hub", "key": "token"}}
    assert spec["scaling"]["maxReplicas"] == 4 and spec["resources"] == {
        "cpu": "8",
        "memory": "32Gi",
        "gpuResource": "amd.com/gpu",
        "gpus": 2,
    }
    args = ["--enable-auto-tool-choice", "--tool-call-parser=llama3_json", "--gpu-memory-utilization=0.8", "--seed=1"]
    assert spec["engine"] == {
        "runtime": "VLLM",
        "image": "vllm/vllm-openai:v0.33.0",
        "maxModelLen": 4096,
        "tensorParallel": 2,
        "args": args,
    }
    assert spec["routing"] == {"policy": "Session", "replicas": 3, "metricsNames": "VLLM"} == qwen["spec"]["routing"]
    assert spec["router"]["podTemplate"]["spec"]["containers"] == [{"name": "router", "resources": {"requests": {"cpu": "400m"}}}]
    assert spec["exposure"] == {"otherServices": ["qwen"]}
    pod = spec["podTemplate"]["spec"]
    assert pod["runtimeClassName"] == "nvidia" and [one["key"] for one in pod["tolerations"]] == ["gpu", "model"]
    assert pod["affinity"]["nodeAffinity"] and pod["volumes"][0]["emptyDir"]["sizeLimit"] == "4Gi"
    assert qwen["spec"]["model"]["uri"] == "hf://org/qwen"
    for listed in (
        "servingEngineSpec.vllmApiKey (not shown)",
        "servingEngineSpec.strategy",
        "modelSpec[0].pvcStorage",
        "modelSpec[0].lmcacheConfig",
        "enablePrefixCaching",
        "modelSpec[1].hf_token",
        "modelSpec[1].initContainer",
        "routerSpec.sessionKey",
        "routerSpec.ingress",
        "cacheserverSpec",
    ):
        assert listed in messages, listed
    assert "secret-value" not in messages and "hf_plain" not in messages
    assert "modelSpec[1].initContainer" in convert(load(STACK)).documents[1], "a note stands above its own object"


MODEL_SERVICE = """
modelArtifacts: {name: org/Llama, uri: "URI", authSecretName: hub, size: 20Gi}
routing: {servicePort: 8000}
accelerator: {type: amd}
decode:
  replicas: 2
  parallelism: {tensor: 2}
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d:v1
    modelCommand: vllmServe
    args: [--max-model-len=4096, --kv-transfer-config, '{"kv_connector":"NixlConnector","kv_role":"kv_both"}']
    ports: [{containerPort: 8200}]
    mountModelVolume: true
prefill: {replicas: 1}
"""


def test_values_of_llm_ds_model_service() -> None:
    made, messages = only(MODEL_SERVICE.replace("URI", "hf://{{ .Values.modelArtifacts.name }}"))
    spec = made["spec"]
    assert made["metadata"]["name"] == "llama" and spec["replicas"] == 2
    assert spec["model"] == {"uri": "hf://org/Llama", "name": "org/Llama", "secretRef": {"name": "hub", "key": "HF_TOKEN"}}
    assert spec["resources"] == {"gpuResource": "amd.com/gpu", "gpus": 2}
    assert spec["engine"] == {"runtime": "VLLM", "image": "ghcr.io/llm-d/llm-d:v1", "maxModelLen": 4096, "tensorParallel": 2}
    for listed in ("prefill", "routing", "modelArtifacts.size", "--kv-transfer-config", "ports"):
        assert listed in messages, listed
    made, _ = only(MODEL_SERVICE.replace("URI", "pvc+hf://claim/folder/org/Llama"))
    assert made["spec"]["model"]["uri"] == "hf://org/Llama" and made["spec"]["model"]["cache"]["persistentVolumeClaim"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODEL.replace("engine: VLLM", "engine: OLlama"), 'spec.engine "OLlama": only VLLM'),
        (MODEL.replace("hf://org/llama", "ollama://llama"), "spec.url: 'ollama://llama': Ollama's own format is not served"),
        (ISVC.replace("huggingface", "sklearn"), "spec.predictor.model.modelFormat sklearn: only language models"),
        (ISVC.replace("URI", "https://x/m.tar"), "spec.predictor.model.storageUri: 'https://x/m.tar': copy the model to a claim"),
        (ISVC.replace("URI", "s3://${bucket}/m"), "spec.model.uri (from spec.predictor.model.storageUri) must be hf://"),
        (
            DEPLOYMENT.replace("memory: 64Gi", "memory: 64GB"),
            "spec.resources.memory (from spec.template.spec.containers[1].resources.limits.memory)",
        ),
        (DEPLOYMENT.replace('gpu: "2"', 'gpu: "0.5"'), 'nvidia.com/gpu: "0.5" is no number of whole GPUs'),
        (DEPLOYMENT.replace("--model=Qwen/Qwen3-8B", "--seed=1"), "no field names a model"),
        (DEPLOYMENT.replace("name: LEVEL", "name: a.b"), "spec.engine.env[1].name (from spec.template.spec.containers[1].env)"),
        (DEPLOYMENT.replace("a=org/a", "org/a"), '--lora-modules: "org/a" is not NAME=PATH'),
        (DEPLOYMENT.replace("replicas: 2", "replicas: two"), 'spec.replicas: "two" is not understood'),
        (DEPLOYMENT.replace("env:", "env: 3\n        other:"), "env must be a list of mappings (got 3)"),
        (STACK.replace("replicaCount: 3", "replicaCount: 300"), "spec.routing.replicas (from routerSpec.replicaCount)"),
    ],
)
def test_what_cannot_be_migrated_is_named_by_its_own_field(text: str, words: str) -> None:
    result = convert(load(text))
    assert result.failures == 1 and not result.documents and words in "\n".join(result.messages)


def run(capsys: pytest.CaptureFixture[str], *files: Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["migrate", *(word for file in files for word in ("-f", str(file)))])
    return int(str(ended.value.code)), *capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nothing was migrated: found no objects; sources are KServe's"),
        ("a: [", "not YAML: line 1"),
        ("just text", 'contains "just text"'),
        ("kind: Deployment\nspec: {replicas: {{ .Values.n }}}", "line 2 has {{ … }}: it is a Helm template: render it first"),
        (DEPLOYMENT.replace("vllm/vllm-openai:v0.33.0", '"{{ .Values.image }}"'), "is a Helm template: render it first"),
        ("{apiVersion: v1, kind: List, items: []}", "nothing was migrated"),
        ("{apiVersion: x/v1, kind: Foo, metadata: {name: a}}", "Foo a: left out: not a source that is known"),
        ("{apiVersion: fairlead.dev/v1alpha1, kind: InferenceService, metadata: {name: a}}", "is Fairlead's already"),
        (container("{command: [redis-server]}"), "no container runs vLLM (registry/serve:1)"),
        (container("{command: [python3, -m, sglang.launch_server], image: lmsysorg/sglang:v1}"), "runs SGLang"),
        ("replicaCount: 1", "values with replicaCount"),
    ],
)
def test_an_input_without_a_source_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    (tmp_path / "in.yaml").write_text(text)
    status, out, messages = run(capsys, tmp_path / "in.yaml")
    assert (status, out) == (2, "") and words in messages


def test_files_lists_and_failures_are_read_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [*load(DEPLOYMENT), *load(MODEL)]}))
    (tmp_path / "bad.yaml").write_text(MODEL.replace("engine: VLLM", "engine: Infinity"))
    status, out, _ = run(capsys, tmp_path / "list.yaml")
    assert status == 0 and [one["metadata"]["name"] for one in load(out)] == ["qwen", "llama"]
    assert "# From Deployment qwen. Not carried over" in out
    status, out, messages = run(capsys, tmp_path / "list.yaml", tmp_path / "bad.yaml")
    assert status == 1 and len(load(out)) == 2 and "Model llama: not migrated: spec.engine" in messages
    monkeypatch.setattr("sys.stdin", io.StringIO(MODEL))
    status, out, _ = run(capsys, Path("-"))
    assert status == 0 and len(load(out)) == 1
    status, out, messages = run(capsys, tmp_path / "list.yaml", tmp_path / "list.yaml")
    assert status == 1 and "another source became InferenceService qwen too" in messages


@pytest.mark.parametrize(("given", "name"), [("Qwen2.5_7B", "qwen2-5-7b"), ("7b", "m-7b"), ("a" * 60, "a" * 52)])
def test_a_name_that_no_service_may_have_is_changed_and_listed(given: str, name: str) -> None:
    made, messages = only(MODEL.replace("name: llama", f"name: {given}", 1))
    assert made["metadata"]["name"] == name and f"the InferenceService is named {name}" in messages
    assert made["spec"]["model"]["name"] == given, "clients send the same name"


CARRIED_AS_A_WHOLE = ("spec.selector", "volumes", "volumeMounts", "secretKeyRef", "valueFrom")
"""Sections in which Kubernetes has no other fields than those that the result has, or that select the old pods."""


def sections(value: Any, path: str = "") -> list[tuple[str, Body]]:
    """Return each section of a source, with its path."""
    if isinstance(value, list):
        return [found for number, child in enumerate(value) for found in sections(child, f"{path}[{number}]")]
    if not isinstance(value, dict):
        return []
    return [(path, value), *(found for name, child in value.items() for found in sections(child, f"{path}.{name}".lstrip(".")))]


SOURCES = (
    DEPLOYMENT,
    LLM.replace("VERSION", "v1alpha2"),
    ISVC.replace("URI", "hf://a/b"),
    MODEL,
    STACK,
    MODEL_SERVICE.replace("URI", "hf://a/b"),
)


@pytest.mark.parametrize("text", SOURCES)
def test_the_operator_makes_pods_of_each_result(text: str) -> None:
    """Of its pod template too: no path is mounted twice, and each mount has a volume of one kind."""
    for body in migrate(text)[0]:
        body["metadata"] |= {"uid": "uid-1", "generation": 1}
        children = desired(
            InferenceService.parse(body), Observed(), replace(SETTINGS, vllm_image="vllm:1"), datetime(2026, 1, 1, tzinfo=UTC)
        )
        (worker,) = [one for one in children.objects if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-worker")]
        pod = worker["spec"]["template"]["spec"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert len(volumes) == len(pod["volumes"]) and all(len(one) == 2 for one in volumes.values())
        for container in (*pod["containers"], *pod["initContainers"]):
            mounts = container.get("volumeMounts", [])
            assert container["image"] and len({one["mountPath"] for one in mounts}) == len(mounts)
            assert {one["name"] for one in mounts} <= volumes.keys()


@pytest.mark.parametrize("text", SOURCES)
def test_a_field_that_no_table_knows_is_carried_over_or_listed_wherever_it_stands(text: str) -> None:
    for number in range(len(sections(load(text)[0]))):
        body = load(text)[0]
        path, section = sections(body)[number]
        if any(one in path for one in CARRIED_AS_A_WHOLE):
            continue
        section["unknownField"] = "carried-or-listed"
        result = convert([body])
        named = [one.split(": ", 1)[1].split(" ")[0].rstrip(":") for one in result.messages]
        listed = result.failures or any(one and f"{path}.unknownField".lstrip(".").startswith(one) for one in named)
        assert listed or "carried-or-listed" in "\n".join(result.documents), path


@pytest.mark.parametrize("text", SOURCES)
def test_a_value_of_another_type_is_carried_over_listed_or_refused(text: str) -> None:
    """Never a traceback, and never silence."""
    wrong: tuple[Any, ...] = (3, "x", [], [3], {"a": 1}, None, [{}])
    names = [(number, name) for number, (_, section) in enumerate(sections(load(text)[0])) for name in section]
    for turn, (number, name) in enumerate(names):
        body = load(text)[0]
        section = sections(body)[number][1]
        section[name] = wrong[turn % len(wrong)]
        result = convert([body])
        assert result.messages and (result.documents or result.failures or "left out" in result.messages[0]), (name, section)
