"""KServe's LLMInferenceService and InferenceService."""

import pytest
import yaml
from tests.cli.migrate.samples import ISVC, LLM, Body, load, only


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
