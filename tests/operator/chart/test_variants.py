"""Every variant of the chart: a real API server takes it, its pods are restricted, and its roles name what they allow."""

import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART, PROMETHEUS, everything, load, rendered, template

VALUES = Path(__file__).parents[1] / "data" / "values"
AIR_GAPPED = CHART / "values-air-gapped.yaml"
EVERYTHING = (*everything(), "--set=test.keySecret.name=keys")
VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "everything": EVERYTHING,
    "everything-watched": (*EVERYTHING, "--set=watch.namespaces[0]=watched"),
    "air-gapped": ("-f", str(AIR_GAPPED)),
    **{path.stem: ("-f", str(path)) for path in sorted(VALUES.glob("*.yaml"))},
}
MONITORS = (*PROMETHEUS, "--api-versions=monitoring.coreos.com/v1/ServiceMonitor")
FOREIGN = ("monitoring.coreos.com/", "gateway.networking.k8s.io/", "inference.networking.k8s.io/")
"""Groups whose CRDs belong to other projects."""
MANIFESTS = ("Deployment", "Pod", "InferenceService")
variants = pytest.mark.parametrize("variant", VARIANTS)


@cache
def text_of(variant: str) -> str:
    return rendered(*MONITORS, *VARIANTS[variant])


def objects(variant: str) -> list[dict[str, Any]]:
    return load(text_of(variant))


def one(made: list[dict[str, Any]], kind: str, end: str) -> dict[str, Any]:
    (found,) = [each for each in made if each["kind"] == kind and each["metadata"]["name"].endswith(end)]
    return found


def pod_specs(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        each["spec"]["template"]["spec"] if each["kind"] == "Deployment" else each["spec"] for each in made if each["kind"] in MANIFESTS[:2]
    ]


def try_out(server: apiserver.ApiServer, made: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Apply without effect, into namespaces that are restricted: unknown fields are refused."""
    labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
    for name in ("fairlead-system", "watched"):
        if server.get(f"/api/v1/namespaces/{name}") is None:
            server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    known = [each for each in made if not each["apiVersion"].startswith(FOREIGN)]
    return server.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump_all(known))


@variants
def test_the_api_server_accepts_each_variant_in_a_restricted_namespace(server: apiserver.ApiServer, variant: str) -> None:
    done = try_out(server, objects(variant))
    assert done.returncode == 0 and "would violate" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ("spec", "template", "spec", "containers", 0, "imagePullPolici"), "Always"),
        ("Deployment", ("spec", "replicas"), "two"),
        ("InferenceService", ("spec", "modle"), {}),
    ],
)
def test_a_wrong_field_is_found(server: apiserver.ApiServer, kind: str, path: tuple[Any, ...], value: Any) -> None:
    made = objects("everything")
    target: Any = next(each for each in made if each["kind"] == kind)
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    assert f"{path[-1]}: " in try_out(server, made).stderr


def test_every_example_is_accepted(server: apiserver.ApiServer) -> None:
    made = [each for path in (CHART.parents[1] / "examples").glob("*.yaml") for each in load(path.read_text())]
    done = try_out(server, [each | {"metadata": {**each["metadata"], "namespace": "default"}} for each in made])
    assert len(made) > 10 and done.returncode == 0, done.stderr


@variants
def test_pods_of_each_variant_are_restricted(variant: str) -> None:
    made = objects(variant)
    for pod in pod_specs(made):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert security["capabilities"] == {"drop": ["ALL"]} and "hostPort" not in str(container.get("ports"))


def test_the_chart_with_everything_has_each_kind() -> None:
    made = objects("everything")
    kinds = {"NetworkPolicy", "PodDisruptionBudget", "ValidatingAdmissionPolicy", "Pod", "InferenceService"}
    assert kinds <= {each["kind"] for each in made} and len(pod_specs(made)) == 3


@variants
def test_roles_of_each_variant_have_no_wildcard_and_subjects_exist(variant: str) -> None:
    made = objects(variant)
    (account,) = {
        each["spec"]["template"]["spec"]["serviceAccountName"]
        for each in made
        if "operator" in each["metadata"]["name"] and each["kind"] == "Deployment"
    }
    for rule in (rule for each in made if each["kind"] in ("Role", "ClusterRole") for rule in each["rules"]):
        assert "*" not in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]]
        if "secrets" in rule["resources"] and "resourceNames" not in rule:
            assert set(rule["verbs"]) <= {"create", "patch"}, "Secrets are written and never read"
    for binding in (each for each in made if each["kind"] in ("RoleBinding", "ClusterRoleBinding")):
        assert [subject["name"] for subject in binding["subjects"]] == [account]


def test_values_shape_pods_accounts_and_names() -> None:
    made = objects("complete")
    deployment = one(made, "Deployment", "-operator")
    pod = deployment["spec"]["template"]
    assert deployment["metadata"]["name"] == "inference-operator" and deployment["metadata"]["annotations"] == {"example.com/owner": "ml"}
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items(), "a label of the user cannot break the selector"
    assert pod["metadata"]["labels"]["team"] == "ml" and pod["metadata"]["annotations"] == {"example.com/scan": "true"}
    spec, container = pod["spec"], pod["spec"]["containers"][0]
    assert spec["serviceAccountName"] == "fairlead" == one(made, "ServiceAccount", "")["metadata"]["name"]
    assert one(made, "ServiceAccount", "")["metadata"]["annotations"] == {"example.com/role": "fairlead"}
    assert [each["topologyKey"] for each in spec["topologySpreadConstraints"]] == ["zone"] and "podAntiAffinity" in spec["affinity"]
    assert {"--worker-gpu-image=ghcr.io/fairlead/fairlead-worker-gpu:0.1.0", "--image-pull-secrets=registry", "--log-format=json"} <= set(
        container["args"]
    )
    assert container["args"][-1] == "--rotation-grace=600" and container["env"][-1]["name"] == "HTTPS_PROXY"
    assert container["volumeMounts"][-1]["name"] == spec["volumes"][-1]["name"] == "extra"
    redis = one(made, "Deployment", "-redis")["spec"]["template"]
    assert redis["metadata"]["labels"]["team"] == "ml" and redis["spec"]["containers"][0]["args"][-2:] == ["--io-threads", "2"]
    assert redis["spec"]["volumes"][-1]["name"] == "extra"


def test_service_monitors_replace_pod_monitors() -> None:
    made = objects("complete")
    services, operator = (one(made, "ServiceMonitor", end)["spec"] for end in ("-services", "-operator"))
    assert services["endpoints"][0]["targetPort"] == "admin" and operator["endpoints"][0]["port"] == "health"
    metrics = one(made, "Service", "-operator-metrics")
    assert operator["selector"]["matchLabels"].items() <= metrics["metadata"]["labels"].items()
    assert not [each for each in made if each["kind"] == "PodMonitor"]
    with pytest.raises(AssertionError, match="scrape the same pods: set one of them"):
        template(*MONITORS, "--set=monitoring.podMonitors=true,monitoring.serviceMonitors=true")


def test_account_and_rights_can_be_given() -> None:
    made = objects("given-account")
    assert not {each["kind"] for each in made} & {"Role", "RoleBinding", "ClusterRole", "ServiceAccount", "CustomResourceDefinition"}
    assert one(made, "Deployment", "fl-llm-operator")["spec"]["template"]["spec"]["serviceAccountName"] == "given"


def test_in_an_air_gapped_cluster_every_image_is_the_registrys() -> None:
    made = objects("air-gapped")
    images = [container["image"] for pod in pod_specs(made) for container in pod["containers"]]
    flags = one(made, "Deployment", "-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    images += [flag.partition("=")[2] for flag in flags if flag.partition("=")[0].endswith("-image")]
    mirror = "registry.example.com/mirror"
    assert set(images) == {f"{mirror}/fairlead/fairlead-{name}:0.1.0" for name in ("control", "worker", "worker-gpu")} | {
        f"{mirror}/valkey/valkey:8",
        f"{mirror}/vllm/vllm-openai:v0.33.0",
        f"{mirror}/lmsysorg/sglang:v0.5.23",
    }
    assert "--image-pull-secrets=registry" in flags and "ghcr.io" not in text_of("air-gapped")
    assert all(pod["imagePullSecrets"] == [{"name": "registry"}] for pod in pod_specs(made) if "initContainers" not in pod)


def test_two_namespaced_releases_share_no_object() -> None:
    """One of each namespace, under one release name, beside a CRD that neither owns."""
    chosen = ("-f", str(VALUES / "namespaced.yaml"), "--set=admissionPolicy.enabled=true")
    first, second = (template(*chosen, f"--namespace=home-{team}", f"--set=watch.namespaces[0]={team}") for team in "ab")
    names = [{(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in made} for made in (first, second)]
    assert not names[0] & names[1]
    assert {kind for kind, namespace, _ in names[0] if not namespace} == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    operators = [one(made, "Deployment", "-operator")["spec"]["template"]["spec"]["containers"][0]["args"] for made in (first, second)]
    assert [f"--lease-namespace=home-{team}" in flags for team, flags in zip("ab", operators, strict=True)] == [True, True]
