"""Desired state as a pure function, checked against docs/reference/objects.md and manifest-to-flags.md."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.operator.on_apiserver.test_crd import REFUSED
from tests.operator.support.manifests import SETTINGS, manifest, service

from fairlead_operator.api import InferenceService, InvalidManifest
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.spec import Routing
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import worker_revision
from fairlead_router.config import read_config
from fairlead_worker.config import WorkerConfig

ROOT = Path(__file__).parents[3]
NAMESPACE = "default/qwen"

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def objects(one: InferenceService) -> dict[tuple[str, str], Any]:
    return {(made["kind"], made["metadata"]["name"]): made for made in desired(one, Observed(), SETTINGS, NOW).objects}


def worker_pod(one: InferenceService) -> Any:
    return objects(one)["Deployment", f"{one.name}-worker"]["spec"]["template"]


def worker_args(one: InferenceService) -> list[str]:
    return worker_pod(one)["spec"]["containers"][0]["args"]


parallel = st.integers(1, 8)
specs = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 1000),
        "scaling": st.tuples(st.integers(0, 500), st.integers(1, 1000)).map(
            lambda pair: {"minReplicas": min(pair), "maxReplicas": max(pair)}
        ),
        "engine": st.fixed_dictionaries(
            {},
            optional={
                "maxModelLen": st.sampled_from([4096, 32768]),
                "dtype": st.sampled_from(["Auto", "BFloat16"]),
                "tensorParallel": parallel,
                "args": st.lists(st.sampled_from(["--threads=3", "--scheduling-policy=fcfs"]), max_size=3),
            },
        ),
        "resources": st.fixed_dictionaries({}, optional={"cpu": st.sampled_from(["4", "500m"]), "memory": st.just("8Gi")}),
        "routing": st.fixed_dictionaries(
            {},
            optional={
                "replicas": st.integers(1, 8),
                "policy": st.sampled_from(["Random", "PrefixAware"]),
                "indexMode": st.sampled_from(["Auto", "Remote"]),
            },
        ).filter(lambda routing: routing.get("policy") != "Random" or routing.get("indexMode") != "Remote"),
        "rollout": st.fixed_dictionaries({}, optional={"drainTimeoutSeconds": st.sampled_from([0, 90, 5400])}),
        "podTemplate": st.just(
            {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "worker", "env": [{"name": "X", "value": "1"}]}]}}
        ),
    },
)


@given(specs)
@settings(deadline=None)
def test_promises_of_every_manifest(spec: dict[str, Any]) -> None:
    one = service(**json.loads(json.dumps(spec)))
    made = objects(one)
    assert json.dumps(list(made.values())) == json.dumps(list(objects(one).values())), "same inputs, same objects"
    for child in made.values():
        assert child["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
        assert child["metadata"]["labels"]["app.kubernetes.io/instance"] == "qwen"
    for component in ("worker", "router"):
        deployment = made["Deployment", f"qwen-{component}"]
        pod = deployment["spec"]["template"]
        assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        drain = one.spec.rollout.drain_timeout_seconds
        assert pod["spec"]["terminationGracePeriodSeconds"] == drain + 15
        (container,) = pod["spec"]["containers"]
        namespace = (f"--index-namespace={NAMESPACE}", {"name": "FAIRLEAD_INDEX_NAMESPACE", "value": NAMESPACE})
        assert f"--drain-timeout={drain}" in container["args"]
        assert namespace[0] in container["args"] if component == "router" else namespace[1] in container["env"]
        restricted(pod["spec"])
    replicas = made["Deployment", "qwen-worker"]["spec"]["replicas"]
    low, high = (one.spec.scaling.min_replicas, one.spec.scaling.max_replicas) if one.spec.scaling else (0, 1000)
    assert low <= replicas <= high and (replicas == one.spec.replicas or one.spec.replicas not in range(low, high + 1))
    tensor_parallel = one.spec.engine.tensor_parallel
    assert made["Deployment", "qwen-worker"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(
        tensor_parallel
    )


def restricted(pod: Any) -> None:
    """The fields that the restricted Pod Security profile asks for."""
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False and pod["enableServiceLinks"] is False
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]} and security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True


@given(specs, specs)
@settings(deadline=None)
def test_the_revision_is_of_the_pods_and_not_of_their_number(left: dict[str, Any], right: dict[str, Any]) -> None:
    one, other = service(**json.loads(json.dumps(left))), service(**json.loads(json.dumps(right)))
    same = worker_pod(one)["spec"] == worker_pod(other)["spec"]
    assert not (worker_revision(one) == worker_revision(other) and not same), "pods that differ have revisions that differ"
    scaled = service(**json.loads(json.dumps({**left, "replicas": 7, "routing": {"replicas": 5}})))
    assert worker_revision(scaled) == worker_revision(one)


def test_an_operator_with_other_defaults_keeps_the_revision() -> None:
    # Pinned: when this changes, an upgrade of the operator gives every running service a new revision.
    assert worker_revision(service()) == "c51d9689d7"


def test_the_token_comes_from_the_secret_and_is_never_read() -> None:
    container = worker_pod(service(model={"secretRef": {"name": "hub", "key": "t"}}))["spec"]["containers"][0]
    assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "t"}}} in container["env"]


LITERALS = {  # a field that may be absent is a union with None
    str(field.alias): [one for one in (field.annotation, *get_args(field.annotation)) if get_origin(one) is Literal]
    for field in Engine.model_fields.values()
}
ENUMS = {alias: get_args(literals[0]) for alias, literals in LITERALS.items() if literals}
del ENUMS["runtime"]  # the others do not run fairlead-worker


@pytest.mark.parametrize("field", ENUMS)
def test_the_worker_accepts_every_value_of_an_enum_of_engine(field: str) -> None:
    """A value that is in the CRD but not in children/worker.py would stop the reconcile of the service."""
    containers = []
    for value in ENUMS[field]:
        one = service(engine={field: value}, resources={"gpus": int(value == "FP8")})
        WorkerConfig.from_command_line(worker_args(one))
        containers.append(json.dumps(worker_pod(one)["spec"]["containers"][0]))
    assert len(set(containers)) == len(containers), "two values have the same effect"


def test_fields_that_a_manifest_does_not_use_add_no_argument() -> None:
    """Workers' images that are older than a field still start."""
    plain = worker_args(service())
    assert plain == worker_args(service(engine={"quantization": "None"}))
    flags = {arg.partition("=")[0].removeprefix("--") for arg in plain}
    assert not flags & {"itl-target-ms", "quantization", "host-kv-cache-bytes"}
    assert not any(flag.startswith("speculative") for flag in flags)
    assert len(worker_args(service(engine={"speculativeDecoding": {"method": "NGram"}}))) == len(plain) + 1
    assert worker_args(service(engine={"args": ["--threads=3"]}))[-1] == "--threads=3", "the last one given wins"


@pytest.mark.parametrize(
    ("model", "draft", "argument", "mounted"),
    [
        ("hf://a/b", "hf://a/draft@main", "hf://a/draft@main", {"/var/cache/fairlead"}),
        ("file:///m", "hf://a/draft", "hf://a/draft", {"/var/cache/fairlead"}),
        ("hf://a/b", "pvc://models/draft", "file:///mnt/draft/draft", {"/var/cache/fairlead", "/mnt/draft"}),
        ("pvc://models/big", "pvc://models/small", "file:///mnt/draft/small", {"/mnt/model", "/mnt/draft"}),
        ("pvc://models/big", "file:///draft", "file:///draft", {"/mnt/model"}),
    ],
)
def test_a_draft_model_comes_from_where_models_come_from(model: str, draft: str, argument: str, mounted: set[str]) -> None:
    pod = worker_pod(service(model={"uri": model}, engine={"speculativeDecoding": {"method": "Draft", "draftModelURI": draft}}))["spec"]
    container = pod["containers"][0]
    (config,) = [arg.partition("=")[2] for arg in container["args"] if arg.startswith("--speculative-config=")]
    assert json.loads(config) == {"method": "draft_model", "model": argument}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} - {"/tmp", "/dev/shm"} == mounted
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert ("HF_HOME" in {one["name"] for one in container["env"]}) == ("/var/cache/fairlead" in mounted)


def test_adapters_are_loaded_from_where_models_come_from() -> None:
    named = {"sql": "pvc://loras/sql/v2", "tone": "hf://lab/tone@v1", "plain": "file:///adapters/plain"}
    adapters = [{"name": name, "uri": uri} for name, uri in named.items()]
    one = service(model={"uri": "pvc://models/big", "adapters": adapters})
    pod = worker_pod(one)["spec"]
    container = pod["containers"][0]
    found = [arg.removeprefix("--lora-modules=") for arg in container["args"] if arg.startswith("--lora-modules=")]
    assert found == ["sql=file:///mnt/adapters/0/sql/v2", "tone=hf://lab/tone@v1", "plain=file:///adapters/plain"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts.keys() - {"/tmp", "/dev/shm"} == {"/mnt/model", "/mnt/adapters/0", "/var/cache/fairlead"}
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mounts["/mnt/adapters/0"]]
    assert volume["persistentVolumeClaim"] == {"claimName": "loras", "readOnly": True}
    assert "HF_HOME" in {one["name"] for one in container["env"]}
    assert not any(arg.startswith("--max-loras") for arg in container["args"])
    many = [{"name": f"a{number}", "uri": "file:///a"} for number in range(9)]
    assert "--max-loras=9" in worker_args(service(model={"adapters": many}))
    fewer = service(model={"uri": "pvc://models/big", "adapters": adapters[:2]})
    assert len({worker_revision(each) for each in (one, fewer, service(model={"uri": "pvc://models/big"}))}) == 3, "a change is a rollout"


def test_gpus_absent_take_the_default_and_zero_means_cpu() -> None:
    assert "limits" not in worker_pod(service(resources={"gpus": 0}))["spec"]["containers"][0]["resources"]
    made = objects(service())["Deployment", "qwen-worker"]["spec"]
    assert made["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0} and made["paused"] is False


def test_no_worker_is_best_effort() -> None:
    """The kubelet evicts pods without requests of CPU and memory first, however many GPUs they have."""

    def requests(**spec: Any) -> Any:
        return worker_pod(service(**spec))["spec"]["containers"][0]["resources"].get("requests", {})

    assert requests().items() >= {"cpu": "100m", "memory": "512Mi", "nvidia.com/gpu": "1"}.items()
    assert requests(resources={"gpus": 0}) == {"cpu": "100m", "memory": "512Mi"}
    assert "memory" not in requests(resources={"cpu": "8"}) and "cpu" not in requests(resources={"memory": "8Gi"})
    own = {"spec": {"containers": [{"name": "worker", "resources": {"limits": {"memory": "256Mi"}}}]}}
    assert "memory" not in requests(podTemplate=own), "a default request could be above the user's limit"


def test_scheduling_constraints_of_the_pod_template_add_up() -> None:
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*zones, {}]}}
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    dedicated = {"key": "dedicated", "operator": "Exists"}
    template = {"spec": {"affinity": {"nodeAffinity": required}, "tolerations": [dedicated, gpu]}}
    spec = worker_pod(service(resources={"gpuType": "H100"}, podTemplate=template))["spec"]
    terms = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    product = {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["H100"]}
    assert terms == [{"matchExpressions": [product, *zone["matchExpressions"]]} for zone in zones] + [{}], "an empty term matches no node"
    assert spec["tolerations"] == [gpu, dedicated], "none is lost, none is there twice"


def test_the_pod_template_is_merged_last_and_cannot_break_the_selector() -> None:
    template = {
        "metadata": {"labels": {"team": "a", "app.kubernetes.io/instance": "stolen"}},
        "spec": {
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {"name": "worker", "env": [{"name": "HOME", "value": "/home"}, {"name": "B", "value": "2"}]},
                {"name": "side", "image": "s"},
            ],
            "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}],
        },
    }
    pod = worker_pod(service(podTemplate=template))
    assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "qwen" and pod["metadata"]["labels"]["team"] == "a"
    container, side = pod["spec"]["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    assert env["HOME"] == "/home" and env["B"] == "2" and "POD_IP" in env and side["name"] == "side" and container["args"]
    assert {"name": "tmp", "emptyDir": {"medium": "Memory"}} in pod["spec"]["volumes"] and len(pod["spec"]["volumes"]) == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"uri": "s4://x/y"}}, "spec.model.uri"),
        ({"scaling": {"minReplicas": 3, "maxReplicas": 1}}, "3 > 1"),
        ({"engine": {"tensorParallel": 2}, "resources": {"gpus": 1}}, "2 is not 1"),
        ({"engine": {"kvCache": {"blockTokens": 40}}}, "40 is not a multiple of 16"),
        ({"engine": {"nonsense": 1}}, "spec.engine.nonsense: unknown field"),
        ({"replica": 1}, "spec.replica: unknown field; did you mean replicas?"),
        ({"model": {"adapters": [{"name": "a", "url": "hf://a/b"}]}}, "spec.model.adapters[0].url: unknown field; did you mean uri?"),
        ({"rollout": {"paused": "true"}}, "spec.rollout.paused: must be true or false, without quotes (got 'true')"),
        (
            {"rollout": {"canary": {"trafficPercent": "10"}}},
            "spec.rollout.canary.trafficPercent: must be a whole number, without quotes (got '10')",
        ),
        ({"rollout": {"canary": {"maxTTFTIncrease": "1.5"}}}, "maxTTFTIncrease: must be a percentage such as 1%, 0.5% or 50% (got '1.5')"),
        ({"rollout": "Auto"}, "spec.rollout: must be a mapping (got 'Auto')"),
        ({"scaling": {"minReplicas": 1}}, "spec.scaling.maxReplicas: is required"),
        ({"rollout": {"restartedAt": "2026-01-01T00:00:00"}}, "spec.rollout.restartedAt must be a time with a zone"),
        ({"slo": {"classes": [{"name": "a"}, {"name": "a"}]}}, "spec.slo.classes must not contain a name twice"),
        ({"model": {"adapters": [{"name": "a", "uri": "hf://a/b"}] * 2}}, "spec.model.adapters must not contain a name twice"),
        ({"exposure": {"fromNamespaces": ["*"]}}, "spec.exposure.fromNamespaces[0]: must be lower-case letters, digits and '-'"),
        ({"model": {"adapters": "x" * 500}}, "spec.model.adapters: must be a list (got '" + "x" * 79 + "…)"),
    ],
)
def test_invalid_manifests_are_refused_without_an_api_server(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidManifest) as refused:
        InferenceService.parse(manifest(**spec))
    assert words in str(refused.value)


@pytest.mark.parametrize(("spec", "words"), REFUSED, ids=[json.dumps(spec) for spec, _ in REFUSED])
def test_python_refuses_whatever_the_api_server_refuses(spec: dict[str, Any], words: str) -> None:
    """`fairlead up` promises the same checks."""
    with pytest.raises(InvalidManifest) as refused:
        InferenceService.parse(manifest(**json.loads(json.dumps(spec))))
    by_schema = re.fullmatch(r'(?:unknown field )?"?(spec\.[\w.]+)[][\w.]*"?(: .*value.*)?', words)  # there it has other words
    assert (by_schema[1] if by_schema else words) in str(refused.value)


@pytest.mark.parametrize("metadata", ["qwen", {"name": 7}, {"name": "9lives"}, {"name": "../x"}, {"name": "a" * 53}, {}])
def test_invalid_names_are_refused_without_an_api_server(metadata: Any) -> None:
    with pytest.raises(InvalidManifest, match=r"metadata(\.name)? (must|is missing)"):
        InferenceService.parse({**manifest(), "metadata": metadata})


def test_workers_and_routers_know_every_setting_that_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = {
        "kvCache": {"size": "1Gi", "hostSize": "2Gi", "dtype": "FP8"},
        "threads": 2,
        "maxModelLen": 64,
        "schedulingPolicy": "FirstComeFirstServed",
        "itlTargetMilliseconds": 40,
        "quantization": "Int8",
        "speculativeDecoding": {"method": "Draft", "draftModelURI": "pvc://models/draft"},
    }
    routing = {"policy": "LeastLoad", "forwardingMode": "Redirect", "metricsNames": "VLLM", "holdTimeoutSeconds": 12}
    left = {str(field.alias) for field in Routing.model_fields.values()} - routing.keys()
    assert left == {"indexMode", "image", "replicas", "args"}, "set a new field here, so that the router has to know its flag"
    one = service(engine=engine, resources={"gpus": 0}, model={"name": "m"}, routing=routing)
    made = objects(one)

    def given(component: str) -> list[str]:
        (container,) = made["Deployment", f"qwen-{component}"]["spec"]["template"]["spec"]["containers"]
        for variable in container["env"]:
            if component == "worker" and variable["name"].startswith("FAIRLEAD_"):
                monkeypatch.setenv(variable["name"], variable.get("value", "qwen-0").replace("$(POD_IP)", "10.0.0.7"))
        return list(container["args"])

    worker_config = WorkerConfig.from_command_line(given("worker"))
    assert worker_config.names == ("m",) and worker_config.kv_cache_memory_bytes == 1 << 30
    assert (worker_config.pod, worker_config.advertise, worker_config.admin_port) == ("qwen-0", "10.0.0.7:8000", 8002)
    assert worker_config.index_namespace == "default/qwen" and worker_config.redis is not None and worker_config.warmup_tokens == 8192
    assert worker_config.host_kv_cache_bytes == 2 << 30 and worker_config.itl_target_ms == 40
    assert worker_config.kv_cache_dtype == "fp8"
    assert worker_config.quantization == "int8" and worker_config.scheduling_policy == "fcfs"
    drafts = worker_config.speculative_config
    assert drafts is not None and (drafts.num_speculative_tokens, drafts.model) == (5, "file:///mnt/draft/draft")
    monkeypatch.undo()
    router_config = read_config(given("router"))
    assert router_config.namespace == "default/qwen" and router_config.hold_timeout == 12
    assert (router_config.policy, router_config.forwarding_mode, router_config.metrics_names) == ("LeastLoad", "redirect", "vllm")
    assert not [flag for flag in given("router") if flag.startswith("--index-mode")]  # the default: routers of before know no such flag
    made = objects(service(routing={"policy": "PrefixAware", "indexMode": "Mirror"}))
    routing = read_config(given("router"))
    assert (routing.policy, routing.index_mode) == ("PrefixAware", "mirror")

    made = objects(service(engine={"tensorParallel": 2}))
    assert WorkerConfig.from_command_line(given("worker")).tensor_parallel_size == 2
    pod = made["Deployment", "qwen-worker"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_a_worker_is_replaced_only_when_routers_can_know_its_successor_and_a_stuck_process_is_not_waited_for() -> None:
    made = objects(service(rollout={"drainTimeoutSeconds": 7200}))
    assert made["Deployment", "qwen-worker"]["spec"]["minReadySeconds"] == 10
    for component in ("worker", "router"):
        pod = made["Deployment", f"qwen-{component}"]["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] == 7215
        assert pod["containers"][0]["livenessProbe"]["terminationGracePeriodSeconds"] == 15


def test_an_endpoint_for_traces_reaches_workers_and_routers_as_the_standard_variable() -> None:
    variable = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}
    for settings_of_operator, count in ((SETTINGS, 0), (replace(SETTINGS, otlp_endpoint="http://collector:4318"), 2)):
        made = desired(service(), Observed(), settings_of_operator, NOW).objects
        pods = [one["spec"]["template"]["spec"]["containers"][0]["env"] for one in made if one["kind"] == "Deployment"]
        assert sum(variable in environment for environment in pods) == count


def test_workers_with_gpus_have_their_own_image() -> None:
    both = replace(SETTINGS, worker_gpu_image="gpu:1")
    for gpus, image in ((0, "worker:1"), (1, "gpu:1"), (None, "gpu:1")):
        one = service(resources={} if gpus is None else {"gpus": gpus})
        made = {each["metadata"]["name"]: each for each in desired(one, Observed(), both, NOW).objects if each["kind"] == "Deployment"}
        assert made["qwen-worker"]["spec"]["template"]["spec"]["containers"][0]["image"] == image


def test_pull_secrets_of_the_installation_are_the_default() -> None:
    given = replace(SETTINGS, image_pull_secrets=("registry",))
    for own, expected in (([], ["registry"]), ([{"name": "mine"}], ["mine"])):
        for made in desired(service(imagePullSecrets=own), Observed(), given, NOW).objects:
            if made["kind"] == "Deployment":
                assert [each["name"] for each in made["spec"]["template"]["spec"]["imagePullSecrets"]] == expected
