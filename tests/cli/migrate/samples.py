"""Sources that the tests of `fairlead migrate` convert, one of each kind."""

from typing import Any

import yaml

from fairlead.migrate.command import convert
from fairlead_operator.api import InferenceService

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
               --tensor-parallel-size, "2", --enable-auto-tool-choice, --chat-template=/chat/t.jinja, --max-num-batched-tokens=4096,
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

STACK = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: "vllm-llama-deployment-vllm", labels: {model: llama, helm-release-name: vllm}}
spec:
  replicas: 2
  progressDeadlineSeconds: 1200
  selector: {matchLabels: {model: llama, helm-release-name: vllm}}
  template:
    metadata: {labels: {model: llama, helm-release-name: vllm}}
    spec:
      runtimeClassName: nvidia
      affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: []}]}}}
      hostname: vllm-llama-vllm-stack
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.33.0
        command: [vllm, serve, org/llama, --host, "0.0.0.0", --port, "8000", --enable-auto-tool-choice, --tool-call-parser, llama3_json,
                  --no-enable-prefix-caching, --max-model-len, "4096", --tensor-parallel-size, "2", --gpu_memory_utilization, "0.8",
                  --kv-transfer-config, '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}']
        env:
        - {name: HF_HOME, value: /data}
        - {name: LMCACHE_LOG_LEVEL, value: DEBUG}
        - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: vllm-secrets, key: hf_token_llama}}}
        ports: [{name: container-port, containerPort: 8000}]
        resources: {requests: {memory: 32Gi, cpu: 8, nvidia.com/gpu: 2}, limits: {nvidia.com/gpu: 2}}
        volumeMounts: [{name: vllm-storage, mountPath: /data}, {name: shm, mountPath: /dev/shm}]
      volumes:
      - {name: vllm-storage, persistentVolumeClaim: {claimName: vllm-llama-storage-claim}}
      - {name: shm, emptyDir: {medium: Memory, sizeLimit: 20Gi}}
"""
"""A Deployment of vLLM's production-stack, as `helm template` writes it."""

MODEL = """
apiVersion: kubeai.org/v1
kind: Model
metadata: {name: llama, labels: {team: a}}
spec:
  features: [TextGeneration, TextEmbedding]
  owner: meta
  url: hf://org/llama
  adapters: [{name: a, url: "hf://org/a"}]
  engine: VLLM
  args: [--max-model-len=8192, --tensor-parallel-size=2]
  env: {NCCL_DEBUG: INFO, HF_HOME: /x}
  envFrom: [{secretRef: {name: more}}]
  resourceProfile: nvidia-gpu-l4:2
  cacheProfile: efs
  files: [{path: /t.jinja, content: x}]
  replicas: 2
  minReplicas: 1
  maxReplicas: 5
  targetRequests: 32
  scaleDownDelaySeconds: 60
  loadBalancing: {strategy: PrefixHash, prefixHash: {meanLoadFactor: 110}}
  priorityClassName: high
"""

VALUES = """
servingEngineSpec:
  runtimeClassName: nvidia
  tolerations: [{key: gpu, operator: Exists}]
  vllmApiKey: secret-value
  strategy: {type: Recreate}
  configs: {LOG: 1}
  env: [{name: LEVEL, value: "2"}]
  modelSpec:
  - name: llama
    labels: {team: a}
    podLabels: {tier: gpu}
    repository: vllm/vllm-openai
    tag: v0.33.0
    modelURL: org/llama
    modelRevision: main
    chatTemplate: t.jinja
    replicaCount: 2
    requestCPU: 8
    limitCPU: 9
    requestMemory: 32Gi
    requestGPU: 2
    requestGPUType: amd.com/gpu
    requestGPUMem: "3000"
    hf_token: {secretName: hub, secretKey: key}
    envFromSecret: {name: s3}
    imagePullSecret: registry
    pvcStorage: 50Gi
    storageClass: fast
    extraVolumes: [{name: logs, emptyDir: {}}, {name: unused, emptyDir: {}}]
    extraVolumeMounts: [{name: logs, mountPath: /logs}]
    initContainer: {name: i, image: i}
    shmSize: 4Gi
    enableLoRA: true
    enableTool: true
    toolCallParser: llama3_json
    vllmConfig: {maxModelLen: 4096, tensorParallelSize: 2, pipelineParallelSize: 2, enablePrefixCaching: false, gpuMemoryUtilization: 0.8,
                 extraArgs: [--seed, 1], v1: 1}
    lmcacheConfig: {enabled: true}
    nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: In, values: [a]}]}]
    tolerations: [{key: model, operator: Exists}]
    keda: {enabled: true, minReplicaCount: 1, maxReplicaCount: 4, cooldownPeriod: 60}
  - {name: qwen, repository: vllm/vllm-openai, modelURL: org/qwen, requestGPU: 1, hf_token: hf_plain, pvcStorage: 1Gi,
     pvcExistingClaimName: weights, runtimeClassName: "", tolerations: [{key: own}], tolerationsPolicy: override, chatTemplate: qwen.jinja,
     resources: {limits: {nvidia.com/gpu: 1}, requests: {cpu: 3}}}
  - {name: idle, enabled: false}
routerSpec:
  enableRouter: false
  replicaCount: 3
  routingLogic: session
  sessionKey: x-user-id
  ingress: {enabled: true}
  resources: {requests: {cpu: 400m}}
cacheserverSpec: {replicaCount: 1}
loraAdapters:
- {name: x, baseModel: llama, adapterSource: {type: huggingface, adapterName: sql, repository: org/sql, credentials: hf_c}}
- {name: y, baseModel: qwen, adapterSource: {type: local, adapterName: y, adapterPath: /data/y}}
"""


def container(command: str, more: str = "") -> str:
    body = load(DEPLOYMENT)[0]
    pod = body["spec"]["template"]["spec"]
    found = {"name": "vllm", "image": "registry/serve:1", "resources": {"limits": {"nvidia.com/gpu": 1}}, **yaml.safe_load(command)}
    return yaml.safe_dump(
        body | {"spec": {**body["spec"], "template": {"spec": {**pod, "containers": [found], **yaml.safe_load(more or "{}")}}}}
    )
