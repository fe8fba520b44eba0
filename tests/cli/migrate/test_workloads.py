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
                "command": ["bash", "-c", "set -e\n# vllm serve org/old\ncd /x && exec vllm serve org/m $FLAGS 2>&1 | tee /l # --seed=2"],
                "env": [{"name": "FLAGS", "value": "--max-num-seqs=9 --seed=1"}],
            }
        ),
        "{command: [vllm, serve], args: [$(M), --max-num-seqs=$(N), --seed=1], env: [{name: M, value: org/m}, {name: N, value: '9'}]}",
        "{image: vllm/vllm-openai:v1, args: [serve, org/m, --max-num-seqs=9, --seed=1]}",
        "{image: vllm, args: [--model, org/m, --max-num-seqs=9, --seed=1]}",
    ],
)
def test_every_spelling_of_the_command_line_gives_the_same(command: str) -> None:
    made, messages = only(container(command))
    spec = made["spec"]
    assert (spec["model"]["uri"], spec["model"]["name"]) == ("hf://org/m", "org/m")
    assert (spec["engine"]["maxNumSeqs"], spec["engine"]["args"]) == (9, ["--seed=1"])
    assert ("cd /x" in messages) == ("cd /x" in command), "other commands of a script are listed"


@pytest.mark.parametrize(
    ("script", "line", "construct"),
    [
        ("vllm serve a/b & vllm serve c/d & wait", 1, '"&": a command in the background'),
        ("vllm serve a/b\nvllm serve c/d", 2, '"vllm": a command after the server'),
        ("set -e\nif true; then vllm serve a/b; else vllm serve c/d; fi", 2, '"if": another command'),
        ("vllm serve a/b \\\n# --enforce-eager \\\n--seed 1", 3, '"--seed": another command'),
        ("vllm serve a/b --max-num-seqs ${SEQS:=16}", 1, '"${SEQS:=16}": a substitution'),
        ("N=$((1+1))\nvllm serve a/b -tp $N", 1, '"$((1+1))": a substitution'),
        ("ARGS=(--max-model-len 4096)\nvllm serve a/b ${ARGS[@]}", 1, "a function, subshell or array"),
        ("vllm serve a/b --max-num-seqs `nproc`", 1, '"`nproc`": a substitution'),
        ('vllm serve "a/$(cat /name)"', 1, "a substitution"),
        ("vllm serve a/b --seed $SEED", 1, '"$SEED": no variable of the container'),
        ("vllm serve a/b | grep -v x", 1, '"|": a pipe'),
        ("vllm serve a/b || exit 1", 1, '"||": an alternative'),
        ("pip install x && vllm serve a/b", 1, '"pip": it changes the image: build an image with it'),
        ("python3 -m pip install x\nvllm serve a/b", 1, '"python3 -m pip": it changes the image'),
        (". /venv/bin/activate; vllm serve a/b", 1, '".": it changes the image'),
        ("source /venv/bin/activate; vllm serve a/b", 1, '"source": it changes the image'),
        ("apt-get update && vllm serve a/b", 1, '"apt-get": it changes the image'),
        ("echo '{}' > /tmp/c.json; vllm serve a/b --config /tmp/c.json", 1, "a file that the script writes"),
        ("echo x | tee /tmp/c; vllm serve a/b", 1, '"tee /tmp/c": another command'),
        ("vllm serve a/b; sleep infinity", 1, '"sleep": a command after the server'),
        ("for one in a; do vllm serve a/b; done", 1, '"for": another command'),
        ("vllm serve a/b <<< x", 1, "an input"),
        ("vllm serve 'a/b", 1, "a quote without its end"),
        ("vllm serve a/b --chat-template ~/x", 1, "a pattern or group"),
        ("A=~/x vllm serve a/b", 1, '"A=~/x": another command'),
        ("vllm serve a/b --o $M", 1, '"$M": quotes or patterns in a variable'),
        ("# vllm serve a/b", 1, "no command starts vLLM"),
        ("vllm serve a/b --x a\fb", 1, r"'\x0c', which a shell takes for a letter"),
        ("vllm serve a/b\xa0--x", 1, r"'\xa0', which a shell takes for a letter"),
        ("vllm serve a/b 2>&1foo", 1, "an output"),
        ('vllm serve a/b 2>&1"x"', 1, "an output"),
        (";vllm serve a/b", 1, '";": no command before it'),
        ("cd /x;; vllm serve a/b", 1, '";": no command before it'),
        ("cd /x\n&& vllm serve a/b", 2, '"&&": no command before it'),
        ("vllm serve a/b &&\n # end", 2, '"&&": no command after it'),
        ("echo x > /dev/shm/c; vllm serve a/b", 1, '"> /dev/shm/c": a file that the script writes'),
        ("echo x > /c 2>&1; vllm serve a/b", 1, '"> /c": a file that the script writes'),
        ("> /c; vllm serve a/b", 1, '"> /c": a file that the script writes'),
        ("exec --x vllm serve a/b", 1, '"exec --x vllm": another command'),
        ("A=1 --x vllm serve a/b", 1, '"A=1 --x vllm": another command'),
        ("A=/x:~/y vllm serve a/b", 1, '"A=/x:~/y": another command'),
    ],
)
def test_a_script_with_more_than_one_simple_command_is_refused(script: str, line: int, construct: str) -> None:
    result = convert(load(container(yaml.safe_dump({"command": ["bash", "-c", script], "env": [{"name": "M", "value": "{'k': 1}"}]}))))
    assert not result.documents and f"line {line} of the script: " in result.messages[0] and construct in result.messages[0]


@pytest.mark.parametrize(
    ("script", "args", "env"),
    [
        ("vllm serve a/b --seed 8 # --tensor-parallel-size 8", ["--seed=8"], {}),
        ("# old: vllm serve a/old -tp 4\nvllm serve a/b --x=a#b", ["--x=a#b"], {}),
        (
            "A=1; export B='x y' HF_TOKEN=hf_x\nC=2 vllm serve a/b --a $A --b \"$B\" --c ${C:-3}",
            ["--a=1", "--b=x y", "--c=3"],
            "B HF_TOKEN C",
        ),
        ("vllm serve a/b --a '$A \\' --o \"{\\\"k\\\": 1}\" \\\n --b ''", ["--a=$A \\", '--o={"k": 1}', "--b="], {}),
        ('echo "Start $M" >&2; sleep 5 && ulimit -n 65535\nvllm serve $(M) --a $KEY --b=${P}', ["--a=$(KEY)", "--b=$(P)"], "M KEY P"),
        ("vllm serve $(M) --a $KEY --b=${P}", ["--a=$(KEY)", "--b=$(P)"], "M KEY P"),
        ("vllm serve a/b --a=~/x --b x~", ["--a=~/x", "--b=x~"], {}),
        ("cd /x &&\n\n# now\necho x >/dev/null 2>/dev/stderr; vllm serve a/b --a 1 >/l 2>&1|tee /k;", ["--a=1"], {}),
    ],
)
def test_a_script_is_read_as_a_shell_reads_it(script: str, args: list[str], env: str) -> None:
    secret = {"secretKeyRef": {"name": "s", "key": "k"}}
    given = [{"name": "M", "value": "a/b"}, {"name": "KEY", "valueFrom": secret}, {"name": "P", "valueFrom": secret}] if "M" in env else []
    made, messages = only(container(yaml.safe_dump({"command": ["bash", "-ec", script], "env": given})))
    engine = made["spec"]["engine"]
    assert made["spec"]["model"]["uri"] == "hf://a/b" and engine["args"] == args and "tensorParallel" not in engine
    assert [one["name"] for one in engine.get("env", [])] == list(env.split() if env else [])
    assert ("the token is in the manifest" in messages) == ("HF_TOKEN" in env)
    assert all((f'"{name} ' in messages) == (name in script) for name in ("echo", "sleep", "ulimit"))


PROXY = {"name": "proxy", "image": "ghcr.io/berriai/litellm:v1", "args": ["--model", "openai/x"]}
VLLM = {"name": "vllm", "image": "reg:5000/vllm-openai:v1"}


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([PROXY, VLLM | {"args": ["--model", "a/b"]}], ""),
        ([VLLM | {"args": ["a/b", "--max-model-len=8192"]}], ""),
        ([VLLM | {"command": ["python3"], "args": ["-m", "vllm.entrypoints.cli.main", "serve", "a/b"]}], ""),
        ([VLLM | {"args": ["serve", "a/b", "--model", "a/c"]}], '--model "a/c": a/b is used instead'),
        ([VLLM | {"command": ["numactl", "-N", "0", "vllm", "serve", "a/b"]}], "numactl -N 0"),
        ([VLLM | {"command": ["sh", "-c", "vllm serve a/b"], "args": ["--seed=1"]}], "the shell does not give it to vLLM"),
        ([PROXY], "no container runs vLLM"),
        ([PROXY | {"image": "lmsysorg/sglang:v1"}], "runs SGLang"),
        ([VLLM | {"args": ["/app/start.sh"]}], "no container runs vLLM"),
        ([VLLM | {"args": ["a/b"]}, VLLM | {"name": "two", "args": ["a/c"]}], "each of vllm, two runs vLLM"),
        ([VLLM | {"command": ["python3", "-m", "vllm.entrypoints.openai.run_batch"]}], "does not start vLLM's server"),
        ([VLLM | {"args": ["--model", "unsloth/X-GGUF:Q4_K_M"]}], "names a quantization"),
        ([VLLM | {"args": ["--model", "pvc://other/../data/m"]}], "has a step '..'"),
    ],
)
def test_the_container_that_runs_vllm_is_found(containers: list[Body], found: str) -> None:
    result = convert(load(container("{}", yaml.safe_dump({"containers": containers}))))
    assert found in "\n".join(result.messages)
    for text in result.documents:
        made = next(yaml.safe_load_all(text))["spec"]
        assert made["model"]["uri"] == "hf://a/b" and "vllm-openai" in made["engine"]["image"]
    assert bool(result.documents) == (found == "" or "used" in found or found in ("numactl -N 0", "the shell does not give it to vLLM"))


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


@pytest.mark.parametrize(
    ("path", "mount", "env", "volume", "said"),
    [
        ("/root/.cache/huggingface", {}, {}, "persistentVolumeClaim", "is found there"),
        ("/root/.cache/huggingface/hub", {}, {}, "persistentVolumeClaim", "is downloaded again"),
        ("/home/vllm/.cache", {}, {}, "persistentVolumeClaim", "is downloaded again"),
        ("/data", {"subPathExpr": "$(POD)"}, {"HF_HOME": "/data"}, "persistentVolumeClaim", "is downloaded again"),
        ("/data", {}, {"HF_HUB_CACHE": "/data/hub"}, "persistentVolumeClaim", "is found there"),
        ("/data", {}, {"XDG_CACHE_HOME": "/data"}, "persistentVolumeClaim", "is downloaded again"),
        ("/root/.cache/huggingface", {}, {}, "nfs", "no volume for spec.model.cache"),
    ],
)
def test_the_cache_of_the_hub_is_found_or_listed(path: str, mount: Body, env: dict[str, str], volume: str, said: str) -> None:
    given = {"volumeMounts": [{"name": "v", "mountPath": path, **mount}], "env": [{"name": name, "value": env[name]} for name in env]}
    made, messages = only(
        container(yaml.safe_dump({"command": ["vllm", "serve", "a/b"], **given}), f"volumes: [{{name: v, {volume}: {{claimName: w}}}}]")
    )
    assert said in messages and ("cache" in made["spec"]["model"]) == (volume == "persistentVolumeClaim")


def test_a_model_in_a_folder_for_each_pod_is_refused() -> None:
    mounts = "volumeMounts: [{name: v, mountPath: /m, subPathExpr: $(POD)}], command: [vllm, serve, /m/x]"
    result = convert(load(container(f"{{{mounts}}}", "volumes: [{name: v, persistentVolumeClaim: {claimName: w}}]")))
    assert not result.documents and "subPathExpr" in result.messages[0]


def test_a_second_gpu_resource_is_listed() -> None:
    made, messages = only(container("{command: [vllm, serve, a/b], resources: {limits: {nvidia.com/gpu: 1, nvidia.com/mig-1g.10gb: 2}}}"))
    assert made["spec"]["resources"]["gpus"] == 1 and "mig-1g.10gb 2: in spec.podTemplate beside nvidia.com/gpu" in messages


@pytest.mark.parametrize("memory", ["1e10", "1E3", "100n", "1Ei", "5e-1"])
def test_a_quantity_of_kubernetes_is_kept(memory: str) -> None:
    made, _ = only(container(f"{{command: [vllm, serve, a/b], resources: {{limits: {{memory: {memory!r}}}}}}}"))
    assert made["spec"]["resources"]["memory"] == memory


def test_a_number_keeps_its_digits() -> None:
    made, _ = only(container("{args: [--model, a/b], image: vllm, resources: {requests: {cpu: 1.23456789, memory: 12345678901.0}}}", ""))
    assert (made["spec"]["resources"]["cpu"], made["spec"]["resources"]["memory"]) == ("1.23456789", "12345678901")
