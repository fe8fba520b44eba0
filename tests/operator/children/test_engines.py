"""Workers of runtime VLLM and SGLang: their two containers, the engine's flags, and what they cannot do."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.support.manifests import SETTINGS, pod, service

from fairlead.kube.facts import find_gpu_resource, gpus_in_use
from fairlead_common.scheduling_policy import DEFINITIONS, SchedulingPolicy
from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.engine_runtime import ENGINES, UNSUPPORTED, Runtime
from fairlead_operator.causes import find_pod_cause
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.rollout.images import image_of, runtime_of
from fairlead_operator.settings import Settings

IMAGES = replace(SETTINGS, vllm_image="vllm:1", sglang_image="sglang:1")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
engines = pytest.mark.parametrize("runtime", ENGINES)


def deployment(one: InferenceService, settings: Settings = IMAGES, observed: Observed | None = None) -> Any:
    made = desired(one, observed or Observed(), settings, NOW).objects
    (found,) = [each for each in made if each["kind"] == "Deployment" and each["metadata"]["name"] == "qwen-worker"]
    return found


def containers(one: InferenceService, settings: Settings = IMAGES) -> tuple[Any, Any]:
    """The engine and the agent."""
    spec = deployment(one, settings)["spec"]["template"]["spec"]
    ((engine,), (agent,)) = spec["initContainers"], spec["containers"]
    return engine, agent


def run(runtime: Runtime, **spec: Any) -> InferenceService:
    return service(**{**spec, "engine": {"runtime": runtime, **spec.get("engine", {})}})


def args(runtime: Runtime, **engine: Any) -> list[str]:
    return list(containers(run(runtime, engine=engine))[0]["args"])


@engines
def test_the_engine_outlives_the_agent_and_serves_the_pod_only(runtime: Runtime) -> None:
    engine, agent = containers(run(runtime, engine={"tensorParallel": 2}, resources={"memory": "64Gi"}))
    assert engine["restartPolicy"] == "Always", "the kubelet stops a sidecar after the agent has drained and exited"
    assert "lifecycle" not in engine and "ports" not in engine and "startupProbe" not in engine
    assert "--host=127.0.0.1" in engine["args"] and "--port=8100" in engine["args"]
    assert engine["image"] == f"{runtime.lower()}:1" and agent["image"] == "control:1"
    assert engine["resources"] == {
        "requests": {"memory": "64Gi", "nvidia.com/gpu": "2"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
    }
    assert "nvidia.com/gpu" not in json.dumps(agent["resources"])
    (events,) = [json.loads(arg.partition("=")[2]) for arg in engine["args"] if arg.startswith("--kv-events-config=")]
    assert events.pop("enable_kv_cache_events", False) is (runtime == "VLLM")
    assert events == {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}
    assert {f"--kv-events={events['endpoint']}", f"--kv-replay={events['replay_endpoint']}"} <= set(agent["args"])
    assert engine["livenessProbe"]["httpGet"] == {"path": "/engine/health", "port": 8002}, (
        "the agent's, since a restart of it would not help"
    )
    template = deployment(run(runtime))["spec"]["template"]
    assert template["metadata"]["annotations"] == {"kubectl.kubernetes.io/default-container": "engine"}
    assert runtime_of(template) == runtime and image_of(template, "worker") == engine["image"]


@engines
def test_the_agent_is_a_worker_for_probes_routers_and_the_index(runtime: Runtime) -> None:
    plain = deployment(service())["spec"]["template"]["spec"]
    (worker,) = plain["containers"]
    engine, agent = containers(run(runtime))
    assert agent["ports"] == worker["ports"]
    assert [agent[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")] == [
        worker[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    of_engines = ("WARMUP", "PEERS")
    wanted = [one for one in worker["env"] if not any(word in one["name"] for word in of_engines)]
    assert agent["env"] == wanted, "pod name, address, namespace of the index, Redis"
    assert {"--drain-timeout=120", f"--runtime={runtime.lower()}", "--engine-url=http://127.0.0.1:8100"} <= set(agent["args"])
    assert {"--model=hf://Qwen/Qwen3-8B", "--served-model-name=qwen", "--port=8000"} <= set(agent["args"])
    for container in (engine, agent):
        assert container["securityContext"] == worker["securityContext"]
        assert "/var/cache/fairlead" in {mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in deployment(run(runtime))["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for container in (engine, agent) for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("model", "named", "mounted"),
    [
        ({"uri": "hf://a/b@main"}, ("a/b", "main"), "/var/cache/fairlead"),
        ({"uri": "hf://a/b", "revision": "abc"}, ("a/b", "abc"), "/var/cache/fairlead"),
        ({"uri": "hf://a/b"}, ("a/b", ""), "/var/cache/fairlead"),
        ({"uri": "pvc://models/qwen/8b"}, ("/mnt/model/qwen/8b", ""), "/mnt/model"),
        ({"uri": "file:///models/tiny"}, ("/models/tiny", ""), None),
    ],
)
@engines
def test_the_engine_names_the_model_in_its_own_way(
    runtime: Runtime, model: dict[str, Any], named: tuple[str, str], mounted: str | None
) -> None:
    engine, agent = containers(run(runtime, model=model))
    name, revision = named
    assert engine["args"][0] == (name if runtime == "VLLM" else f"--model-path={name}")
    assert [arg for arg in engine["args"] if arg.startswith("--revision=")] == ([f"--revision={revision}"] if revision else [])
    for container in (engine, agent):
        paths = {mount["mountPath"] for mount in container["volumeMounts"]} - {"/tmp", "/dev/shm"}
        assert paths == ({mounted} if mounted else set())


EQUAL_FLAGS: dict[Runtime, list[tuple[dict[str, Any], str]]] = {
    "VLLM": [
        ({"maxModelLen": 4096}, "--max-model-len=4096"),
        ({"maxNumSeqs": 9}, "--max-num-seqs=9"),
        ({"maxPrefillTokens": 99}, "--max-num-batched-tokens=99"),
        ({"dtype": "BFloat16"}, "--dtype=bfloat16"),
        ({"quantization": "FP8"}, "--quantization=fp8"),
        ({}, "--scheduling-policy=priority"),
        ({}, "--enable-prompt-tokens-details"),
        ({}, "--disable-uvicorn-access-log"),
        ({"tensorParallel": 4}, "--tensor-parallel-size=4"),
        ({"kvCache": {"pageTokens": 32}}, "--block-size=32"),
        ({"kvCache": {"pages": 7}}, "--num-gpu-blocks-override=7"),
        ({"kvCache": {"dtype": "FP8"}}, "--kv-cache-dtype=fp8_e4m3"),
        ({"kvCache": {"size": "1Gi"}}, "--kv-cache-memory-bytes=1073741824"),
        ({"args": ["--gpu-memory-utilization=0.8"]}, "--gpu-memory-utilization=0.8"),
    ],
    "SGLang": [
        ({"maxModelLen": 4096}, "--context-length=4096"),
        ({"maxNumSeqs": 9}, "--max-running-requests=9"),
        ({"maxPrefillTokens": 99}, "--max-prefill-tokens=99"),
        ({"chunkedPrefillSize": 64}, "--chunked-prefill-size=64"),
        ({"dtype": "Float16"}, "--dtype=float16"),
        ({"quantization": "FP8"}, "--quantization=fp8"),
        ({"schedulingPolicy": "FirstComeFirstServed"}, "--schedule-policy=fcfs"),
        ({"tensorParallel": 4}, "--tensor-parallel-size=4"),
        ({}, "--page-size=16"),
        ({}, "--enable-metrics"),
        ({}, "--enable-cache-report"),
        ({"kvCache": {"dtype": "FP8"}}, "--kv-cache-dtype=fp8_e4m3"),
        ({"kvCache": {"pages": 7, "pageTokens": 32}}, "--max-total-tokens=224"),
        ({"args": ["--mem-fraction-static=0.8"]}, "--mem-fraction-static=0.8"),
    ],
}


@pytest.mark.parametrize(("runtime", "engine", "flag"), [(runtime, *case) for runtime, cases in EQUAL_FLAGS.items() for case in cases])
def test_a_field_with_an_equal_flag_is_passed(runtime: Runtime, engine: dict[str, Any], flag: str) -> None:
    given = args(runtime, **engine)
    assert flag in given and (not engine or given != args(runtime))
    assert not engine.get("args") or given[-1] == flag, "the user's flags win"


@pytest.mark.parametrize("policy", DEFINITIONS)
@engines
def test_each_scheduling_policy_is_passed_or_refused(runtime: Runtime, policy: SchedulingPolicy) -> None:
    vllm, sglang = DEFINITIONS[policy].vllm, DEFINITIONS[policy].sglang
    flag = f"--scheduling-policy={vllm}" if runtime == "VLLM" else f"--schedule-policy={sglang}"
    if (vllm if runtime == "VLLM" else sglang) is not None:
        assert flag in args(runtime, schedulingPolicy=policy)
    else:
        with pytest.raises(InvalidManifest, match=f"schedulingPolicy.* is not for runtime {runtime}"):
            args(runtime, schedulingPolicy=policy)


@engines
def test_every_field_of_engine_is_passed_or_refused(runtime: Runtime) -> None:
    passed = {name for engine, _ in EQUAL_FLAGS[runtime] for name in engine}
    refused = {one.field.partition(".")[0] for one in UNSUPPORTED if runtime in one.runtimes}
    fields = {str(field.alias) for field in Engine.model_fields.values()}
    assert fields - passed - refused == {"runtime", "image", "env"}, "pass it in engine_flags.py, or list it in UNSUPPORTED"
    parts = {str(field.alias) for field in type(Engine().kv_cache).model_fields.values()}
    known = {name for engine, _ in EQUAL_FLAGS[runtime] for name in engine.get("kvCache", {})}
    known |= {one.field.partition(".")[2] for one in UNSUPPORTED if runtime in one.runtimes and one.field.startswith("kvCache.")}
    assert parts == known | ({"pageTokens"} if runtime == "SGLang" else set())


@pytest.mark.parametrize(
    ("runtime", "spec", "words"),
    [
        ("SGLang", {"model": {"uri": "pvc://models/a.gguf"}}, "spec.model.uri of runtime VLLM and SGLang must not name a .gguf file"),
        ("SGLang", {"model": {"uri": "gs://bucket/model"}}, "spec.model.uri of runtime VLLM and SGLang must be an hf://"),
        ("VLLM", {"podTemplate": {"spec": {"containers": [{"name": "worker"}]}}}, "spec.podTemplate.spec.containers of runtime VLLM"),
        ("VLLM", {"engine": {"args": ["--port", "1"]}}, "spec.engine.args must not have --port: remove it"),
        (
            "VLLM",
            {"engine": {"args": ["--tensor_parallel_size=2"]}},
            "spec.engine.args must not have --tensor_parallel_size: set spec.engine",
        ),
        ("VLLM", {"engine": {"args": ["-dp=2"]}}, "spec.engine.args must not have -dp: set spec.replicas"),
        ("VLLM", {"engine": {"args": ["--kv-events-config.endpoint=x"]}}, "spec.engine.args must not have --kv-events-config.endpoint"),
        (
            "VLLM",
            {"engine": {"args": ["--pipeline-parallel-size=4"]}, "resources": {"gpus": 2}},
            "spec.resources.gpus must equal spec.engine.tensorParallel times the pipeline stages in spec.engine.args",
        ),
        ("SGLang", {"engine": {"args": ["--pp-size", "4"], "tensorParallel": 2}, "resources": {"gpus": 4}}, "(4 is not 2 times 4)"),
        ("VLLM", {"engine": {"args": ["-pp", "many"]}}, "-pp must have a number of at least 1 (got 'many')"),
        ("VLLM", {"engine": {"args": ["--no-enable-prefix-caching"]}}, "the prefix index follows the engine's prefix cache"),
        ("VLLM", {"engine": {"args": ["--disable-log-stats"]}}, "the agent reads the load of the engine from its metrics"),
        ("SGLang", {"engine": {"args": ["--tp-size=2"]}}, "spec.engine.args must not have --tp-size: set spec.engine.tensorParallel"),
        ("VLLM", {"engine": {"env": [{"name": "A-B", "value": "1"}]}}, "spec.engine.env[0].name"),
    ],
)
def test_other_combinations_are_refused(runtime: Runtime, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        run(runtime, **spec)
    assert words in str(refused.value)


def test_vllm_loads_adapters_itself() -> None:
    adapters = [{"name": "sql", "uri": "pvc://loras/sql"}, {"name": "org/tone", "uri": "hf://lab/tone"}]
    engine, agent = containers(run("VLLM", model={"adapters": adapters}))
    at = engine["args"].index("--lora-modules")
    assert engine["args"][at - 4 : at + 3] == [
        *("--enable-lora", "--max-loras=2", "--max-cpu-loras=2", "--max-lora-rank=64"),
        *("--lora-modules", "sql=/mnt/adapters/0/sql", "org/tone=lab/tone"),
    ]
    assert "/mnt/adapters/0" in {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert not any("lora" in arg for arg in [*agent["args"], *containers(run("VLLM"))[0]["args"]])


@engines
def test_variables_of_the_user_win_and_those_of_the_hub_reach_the_agent(runtime: Runtime) -> None:
    env = [
        {"name": "HOME", "value": "/home"},
        {"name": "HTTPS_PROXY", "value": "http://proxy:3128"},
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}},
    ]
    engine, agent = containers(run(runtime, engine={"env": env}, model={"secretRef": {"name": "other"}}))
    assert all(one in engine["env"] for one in env)
    assert len({one["name"] for one in engine["env"]}) == len(engine["env"])
    found = {one["name"]: one for one in agent["env"]}
    assert found["HOME"]["value"] == "/tmp" and found["HTTPS_PROXY"] == env[1] and found["HF_TOKEN"] == env[2]
    own = deployment(service(engine={"env": env}))["spec"]["template"]["spec"]["containers"][0]
    assert all(one in own["env"] for one in env), "Fairlead's engine takes them too"


@engines
@pytest.mark.parametrize(
    ("given", "order"),
    [
        (["download"], ["download", "engine"]),
        (["b", "a"], ["b", "a", "engine"]),
        (["a", "engine", "b"], ["a", "engine", "b"]),
        (["engine"], ["engine"]),
    ],
)
def test_init_containers_run_before_the_engine_unless_the_template_says_where_it_is(
    runtime: Runtime, given: list[str], order: list[str]
) -> None:
    """The engine is a sidecar among them: it crashes until a download that runs after it has ended."""
    template = {"spec": {"initContainers": [{"name": name, "env": [{"name": "A", "value": name}]} for name in given]}}
    made = deployment(run(runtime, podTemplate=template))["spec"]["template"]["spec"]["initContainers"]
    assert [one["name"] for one in made] == order
    assert [one["restartPolicy"] for one in made if one["name"] == "engine"] == ["Always"]


@engines
def test_the_pod_template_reaches_both_containers(runtime: Runtime) -> None:
    template = {
        "spec": {
            "initContainers": [{"name": "engine", "securityContext": {"readOnlyRootFilesystem": False}}],
            "containers": [{"name": "agent", "resources": {"limits": {"cpu": "8"}}}, {"name": "side", "image": "s"}],
        }
    }
    spec = deployment(run(runtime, podTemplate=template))["spec"]["template"]["spec"]
    (engine,), (agent, side) = spec["initContainers"], spec["containers"]
    assert engine["securityContext"]["readOnlyRootFilesystem"] is False and engine["securityContext"]["runAsNonRoot"]
    assert agent["resources"]["limits"] == {"cpu": "8", "memory": "4Gi"} and side["name"] == "side"


@pytest.mark.parametrize(
    "flags",
    [
        ["--pipeline-parallel-size=4"],
        ["--pipeline_parallel_size", "4"],
        ["-pp=4"],
        ["--pp-size=4"],
        ["--pipeline-parallel=4"],
        ["--max-num-seqs=8", "-pp", "4"],
    ],
)
def test_pipeline_stages_multiply_the_gpus(flags: list[str]) -> None:
    for gpus in (8, None):
        one = run("VLLM", engine={"tensorParallel": 2, "args": flags}, resources={} if gpus is None else {"gpus": gpus})
        engine, _ = containers(one)
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == "8" and engine["args"][-len(flags) :] == flags
    with pytest.raises(InvalidManifest, match="has no pipeline parallelism"):
        service(engine={"args": ["--pipeline-parallel-size=4"]})


def test_another_runtime_image_flag_or_variable_is_another_revision() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"runtime": "VLLM"},
        {"runtime": "SGLang"},
        {"runtime": "VLLM", "image": "vllm:2"},
        {"runtime": "VLLM", "args": ["--x"]},
        {"runtime": "VLLM", "env": [{"name": "A", "value": "1"}]},
    ]
    revisions = {deployment(service(engine=one))["spec"]["template"]["metadata"]["labels"]["fairlead.dev/revision"] for one in changes}
    assert len(revisions) == len(changes)


@pytest.mark.parametrize(("before", "after"), [("Fairlead", "VLLM"), ("VLLM", "Fairlead"), ("VLLM", "SGLang")])
def test_a_change_of_runtime_does_not_keep_the_image_of_the_other_engine(before: Runtime, after: Runtime) -> None:
    """With engineVersion Auto a revision takes the image that the pods run; another engine must not."""
    auto = {"rollout": {"engineVersion": "Auto"}}
    running = deployment(run(before, **auto))
    made = desired(run(before, **auto), Observed(), IMAGES, NOW).objects
    observed = Observed(deployments={"worker": running}, revisions=tuple(one for one in made if one["kind"] == "ControllerRevision"))
    template = deployment(run(after, **auto), observed=observed)["spec"]["template"]
    assert image_of(template, "worker") == {"Fairlead": "worker:1", "VLLM": "vllm:1", "SGLang": "sglang:1"}[after]
    same = deployment(run(before, **auto), replace(IMAGES, worker_image="worker:2", vllm_image="vllm:2"), observed)
    assert same["spec"]["template"] == running["spec"]["template"], "without a wave, an Auto service keeps its image"


@engines
def test_a_canary_reports_its_revision_through_the_agent(runtime: Runtime) -> None:
    from fairlead_operator.children.canary import _add_mark

    template = _add_mark(deployment(run(runtime))["spec"]["template"], "abc")
    (agent,) = template["spec"]["containers"]
    assert {"name": "FAIRLEAD_CANARY", "value": "abc"} in agent["env"]


@engines
def test_models_are_prefetched_by_the_control_image(runtime: Runtime) -> None:
    cache = {"cache": {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}}
    env = [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "VLLM_X", "value": "1"}]
    made = desired(run(runtime, model=cache, engine={"image": "mine:1", "env": env}), Observed(), IMAGES, NOW).objects
    (job,) = [one for one in made if one["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "control:1" and container["command"] == ["fairlead-prefetch"]
    assert env[0] in container["env"] and env[1] not in container["env"]


def pod_of(engine: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
    common = {"image": "x", "ready": False, "restartCount": 3}
    statuses = {
        "initContainerStatuses": [{"name": "engine", **common, **engine}],
        "containerStatuses": [{"name": "agent", **common, **agent}],
    }
    return pod(phase="Running", conditions=[{"type": "Ready", "status": "False"}], **statuses)


def test_the_cause_names_the_container_that_fails() -> None:
    running = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "started": True}
    starting = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    cause = find_pod_cause(pod_of({**running, "ready": True}, starting))
    assert cause is not None and (cause.reason, cause.fault) == ("Loading", False), "the engine loads the model"
    ended = {"terminated": {"exitCode": 1, "message": "ValueError: unknown flag --x"}}
    cause = find_pod_cause(pod_of({"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}, starting))
    assert cause is not None and cause.reason == "CrashLoopBackOff"
    assert "engine exited with code 1: ValueError: unknown flag --x" in cause.message and "-c engine --previous" in cause.message


def test_explain_counts_the_gpus_of_an_engine() -> None:
    spec = deployment(run("VLLM", engine={"tensorParallel": 2}))["spec"]["template"]["spec"]
    running = {"spec": {**spec, "nodeName": "node1"}, "status": {"phase": "Running"}}
    assert gpus_in_use([running]) == {"node1": 2} and find_gpu_resource([running]) == "nvidia.com/gpu"
