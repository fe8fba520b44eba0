"""A Deployment, StatefulSet or LeaderWorkerSet of vLLM, its command line, volumes and autoscaler."""

import pytest
import yaml
from tests.cli.migrate.samples import DEPLOYMENT, STACK, Body, container, load, only

from fairlead.migrate.command import convert


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
        "dtype": "Float16",
        "tensorParallel": 2,
        "kvCache": {"dtype": "FP8"},
        "args": ["--enable-auto-tool-choice", "--chat-template=/chat/t.jinja", "--enable-chunked-prefill=False"],
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
    ("flags", "gpus", "engine", "used", "replicas"),
    [
        ("--tensor-parallel-size=2", 2, {"tensorParallel": 2}, 2, 2),
        ("-tp 2 -pp 2", 4, {"tensorParallel": 2, "args": ["--pipeline-parallel-size=2"]}, 4, 2),
        ("--pipeline_parallel_size 4", 4, {"args": ["--pipeline-parallel-size=4"]}, 4, 2),
        ("--data-parallel-size=4", 4, {}, 1, 8),
        ("--tensor-parallel-size=2 --data-parallel-size=2", 4, {"tensorParallel": 2}, 2, 4),
        ("--max-model-len=4096", 2, {"maxModelLen": 4096}, 1, 2),
    ],
)
def test_degrees_of_parallelism_become_gpus_and_replicas(flags: str, gpus: int, engine: Body, used: int, replicas: int) -> None:
    made, messages = only(
        container(f"{{command: [sh, -c, 'vllm serve org/m {flags}'], resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}}}")
    )
    spec = made["spec"]
    assert {key: value for key, value in spec["engine"].items() if key not in ("runtime", "image")} == engine
    assert spec["resources"]["gpus"] == used and spec["replicas"] == replicas
    assert ("a replica uses 1" in messages) == ("--max-model-len" in flags)


def test_init_containers_and_sidecars_keep_their_volumes() -> None:
    """The operator starts them before its sidecar with the engine. A volume of theirs never takes the place of one of the operator's."""
    other = {"image": "tool:1", "volumeMounts": [{"name": "cache", "mountPath": "/data"}]}
    more = {
        "initContainers": [{"name": "fetch", **other}],
        "containers": [{"name": "agent", **other}, {"name": "vllm", "image": "v:1", "args": ["--model=a/b"], "command": ["vllm", "serve"]}],
        "volumes": [{"name": "cache", "emptyDir": {}}],
    }
    made, messages = only(container("{}", yaml.safe_dump(more)))
    pod = made["spec"]["podTemplate"]["spec"]
    assert pod["volumes"] == [{"name": "own-cache", "emptyDir": {}}]
    for found, name in ((pod["initContainers"], "fetch"), (pod["containers"], "own-agent")):
        mounts = [{"name": "own-cache", "mountPath": "/data"}]
        assert found == [{"name": name, "image": "tool:1", "volumeMounts": mounts}] and f'"{name.removeprefix("own-")}": runs' in messages


def test_a_deployment_of_production_stack_keeps_its_flags_and_its_cache() -> None:
    made, messages = only(STACK)
    spec = made["spec"]
    assert spec["model"] == {
        "uri": "hf://org/llama",
        "name": "org/llama",
        "secretRef": {"name": "vllm-secrets", "key": "hf_token_llama"},
        "cache": {"persistentVolumeClaim": {"claimName": "vllm-llama-storage-claim"}},
    }
    args = ["--enable-auto-tool-choice", "--tool-call-parser=llama3_json", "--gpu_memory_utilization=0.8"]
    assert (spec["engine"]["maxModelLen"], spec["engine"]["tensorParallel"], spec["engine"]["args"]) == (4096, 2, args)
    assert spec["resources"] == {"cpu": "8", "memory": "32Gi", "gpus": 2} and spec["replicas"] == 2
    pod = spec["podTemplate"]["spec"]
    assert pod["runtimeClassName"] == "nvidia" and pod["affinity"] and pod["volumes"][0]["emptyDir"]["sizeLimit"] == "20Gi"
    for listed in ("--kv-transfer-config", "LMCache", "--no-enable-prefix-caching", "hostname", "labels.helm-release-name"):
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
spec: {minReplicas: 2, maxReplicas: 6, scaleTargetRef: {kind: Deployment, name: qwen}, metrics: [{type: Pods}],
  behavior: {scaleDown: {stabilizationWindowSeconds: 300}}}
"""
KEDA = """
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: k, namespace: llm}
spec: {minReplicaCount: 0, maxReplicaCount: 3, scaleTargetRef: {name: qwen}, triggers: [{type: prometheus}], behavior: 300}
"""


@pytest.mark.parametrize(("scaler", "bounds", "metric"), [(HPA, (2, 6), "Pods"), (KEDA, (0, 3), "prometheus")])
def test_service_and_autoscaler_of_a_deployment_are_read_with_it(scaler: str, bounds: tuple[int, int], metric: str) -> None:
    made, messages = only(f"{DEPLOYMENT}\n---\n{SERVICE}\n---\n{scaler}")
    assert made["metadata"]["name"] == "qwen-fairlead" and "Service qwen exists" in messages
    scaling = made["spec"]["scaling"]
    assert (scaling["minReplicas"], scaling["maxReplicas"]) == bounds and scaling["target"] and "replicas" not in made["spec"]
    assert f"it scaled by {metric}: delete it" in messages
    assert "spec.behavior" in messages and "300" in messages, "its other fields are named"


@pytest.mark.parametrize("args", ["--model a/b", "{--model: a/b}", "[--model, null]", "[--model, a/b, --seed, true]"])
def test_a_command_line_that_is_no_list_of_strings_is_refused_by_name(args: str) -> None:
    result = convert(load(container(f"{{image: vllm/vllm-openai:v1, args: {args}}}", "")))
    assert not result.documents and "containers[0].args must be a list of strings" in result.messages[0]


def test_a_number_keeps_its_digits() -> None:
    made, _ = only(container("{args: [--model, a/b], image: vllm, resources: {requests: {cpu: 1.23456789, memory: 12345678901.0}}}", ""))
    assert (made["spec"]["resources"]["cpu"], made["spec"]["resources"]["memory"]) == ("1.23456789", "12345678901")
