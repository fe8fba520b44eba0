"""Installations in clusters with rules of their own: names that YAML reads as numbers, quotas on limits, taints, and OpenShift's users."""

import itertools
import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml
from tests.operator.support import apiserver
from tests.operator.support.chart import CHART, everything, helm, template
from tests.operator.support.cluster import eventually
from tests.operator.support.controllers import patch
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.api import InferenceService
from fairlead_operator.config import OperatorConfig
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CACHE = {"persistentVolumeClaim": {"claimName": "models"}, "prefetch": "Enabled"}
EVERY_CHILD: dict[str, Any] = {"model": {"cache": CACHE}, "batch": {"storageURI": "pvc://batches"}}
QUOTA = {"limits.cpu": "100", "limits.memory": "1Ti", "requests.cpu": "100", "requests.memory": "1Ti"}
INSTANCE = "app.kubernetes.io/instance"
HOSTILE = ("2024", "1e3", "null", "1.5")


def pods_of(objects: list[Any]) -> dict[str, Any]:
    """Return the pod templates by the names of their objects."""
    found = {}
    for one in objects:
        if one["kind"] in ("Deployment", "Job"):
            found[one["metadata"]["name"]] = one["spec"]["template"]
        elif one["kind"] == "Pod":
            found[one["metadata"]["name"]] = {"metadata": one["metadata"], "spec": one["spec"]}
    return found


def services_pods(one: InferenceService, settings: Any = SETTINGS) -> dict[str, Any]:
    return pods_of(desired(one, Observed(), settings, NOW).objects)


def tiny(*arguments: str) -> InferenceService:
    """Return the service that helm test creates."""
    (made,) = [one for one in template(*arguments) if one["kind"] == "InferenceService"]
    return InferenceService.parse(made)


@pytest.mark.parametrize(("release", "namespace"), list(zip(HOSTILE, itertools.cycle(["12345", "1e3"]), strict=False)))
def test_names_that_yaml_reads_as_numbers_are_strings(server: apiserver.ApiServer, release: str, namespace: str) -> None:
    if server.get(f"/api/v1/namespaces/{namespace}") is None:
        server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    chosen = [
        f"--set-string=watch.namespaces[0]={namespace}",
        "--set-string=images.pullSecrets[0].name=123",
        f"--set-string=test.namespace={namespace}",
    ]
    done = helm("template", release, str(CHART), "--namespace", namespace, *everything(), *chosen)
    assert done.returncode == 0, done.stderr
    # As text: PyYAML reads and writes 1e3 as a string, and Kubernetes as a number.
    documents = done.stdout.split("\n---\n")
    known = "\n---\n".join(one for one in documents if "apiVersion: monitoring." not in one)
    refused = server.kubectl("apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-", stdin=known)
    assert refused.returncode == 0, refused.stderr
    for monitor in (yaml.safe_load(one) for one in documents if "apiVersion: monitoring." in one):
        assert isinstance(monitor["metadata"]["namespace"], str) and isinstance(monitor["metadata"]["labels"][INSTANCE], str)


def test_every_pod_is_admitted_where_a_quota_wants_limits(server: apiserver.ApiServer, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}, "spec": {"hard": QUOTA}}
    server.create(f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    patch(
        server, f"/api/v1/namespaces/{namespace}/resourcequotas/team/status", {"status": {"hard": QUOTA, "used": dict.fromkeys(QUOTA, "0")}}
    )
    limits = {"limits": {"cpu": "4", "memory": "8Gi"}}
    own = {"podTemplate": {"spec": {"containers": [{"name": "worker", "resources": limits}]}}}
    values = "--set=operator.resources.limits.cpu=1,redis.resources.limits.cpu=1"
    pods = pods_of(template(values)) | services_pods(service(**EVERY_CHILD, **own)) | services_pods(tiny())
    assert {"fl-fairlead-test", "qwen-worker", "qwen-router", "qwen-batch", "fl-fairlead-test-worker"} <= set(pods)
    for name, pod in pods.items():
        spec = {**pod["spec"], "serviceAccountName": "default", "automountServiceAccountToken": False}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "try", "labels": pod["metadata"].get("labels")}, "spec": spec}
        code, answer = server.request("POST", f"/api/v1/namespaces/{namespace}/pods?dryRun=All", body)
        assert code == 201, f"{name}: {answer['message']}"


def test_the_pods_of_helm_test_go_where_its_values_say() -> None:
    given = {
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "nodeSelector": {"pool": "test"},
        "podLabels": {"team": "a"},
        "priorityClassName": "low",
        "resources": {"requests": {"cpu": "10m"}, "limits": {"cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi"}},
    }
    flag = f"--set-json=test={json.dumps(given)}"
    pods = services_pods(tiny(flag)) | {"test": pods_of(template(flag))["fl-fairlead-test"]}
    assert set(pods) == {"fl-fairlead-test-worker", "fl-fairlead-test-router", "test"}
    for name, pod in pods.items():
        assert pod["metadata"]["labels"]["team"] == "a" and pod["spec"]["priorityClassName"] == "low", name
        assert given["tolerations"][0] in pod["spec"]["tolerations"] and pod["spec"]["nodeSelector"] == {"pool": "test"}, name
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert container["resources"]["limits"].items() >= given["resources"]["limits"].items(), name
    assert "pool" not in str(pods_of(template(flag))["fl-fairlead-operator"])
    placed = pods_of(template('--set-json=operator.nodeSelector={"pool":"control"}'))
    assert placed["fl-fairlead-test"]["spec"]["nodeSelector"] == {"pool": "control"}, "as the operator, where test says nothing"


def test_on_openshift_no_pod_names_a_user() -> None:
    """The SCC restricted-v2 refuses users and groups outside the namespace's range, and adds those inside."""
    made = template("--set=openshift=true")
    flags = pods_of(made)["fl-fairlead-operator"]["spec"]["containers"][0]["args"]
    settings = OperatorConfig(_cli_parse_args=flags).settings
    pods = pods_of(made) | services_pods(service(**EVERY_CHILD), settings)
    pods |= services_pods(service("vllm", engine={"runtime": "VLLM"}), settings) | services_pods(tiny("--set=openshift=true"), settings)
    assert len(pods) >= 9
    for name, pod in pods.items():
        contexts = [pod["spec"]["securityContext"], *(each.get("securityContext") or {} for each in pod["spec"]["containers"])]
        for context in contexts:
            assert not {"runAsUser", "runAsGroup", "fsGroup", "supplementalGroups"} & set(context), name
        assert contexts[0]["runAsNonRoot"] and contexts[0]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pods_of(template())["fl-fairlead-operator"]["spec"]["securityContext"]["runAsUser"] == 65532


@contextmanager
def ends_pods(server: apiserver.ApiServer, namespace: str, phase: str) -> Iterator[None]:
    """Let the kubelet's part be played: each pod ends with `phase`."""
    stop = threading.Event()

    def play() -> None:
        while not stop.wait(0.1):
            for pod in server.get(f"/api/v1/namespaces/{namespace}/pods")["items"]:
                path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
                if "deletionTimestamp" in pod["metadata"]:
                    server.request("DELETE", path, {"gracePeriodSeconds": 0})
                elif pod["status"].get("phase") == "Pending":
                    server.request("PATCH", f"{path}/status", {"status": {"phase": phase}}, "application/merge-patch+json")

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(("phase", "kept"), [("Failed", True), ("Succeeded", False)])
def test_a_failed_helm_test_keeps_its_service_and_one_that_succeeds_does_not(
    server: apiserver.ApiServer, namespace: str, phase: str, kept: bool
) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    server.request("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    values = [f"--set=crds.install=false,watch.namespaces[0]={namespace}", "--namespace", namespace]
    for verb in (["install", "fl", str(CHART), *values], ["test", "fl", "--namespace", namespace, "--timeout", "60s"]):
        with ends_pods(server, namespace, phase):
            done: subprocess.CompletedProcess[str] = helm(*verb, kubeconfig=server.kubeconfig)
        assert (done.returncode == 0) is (verb[0] == "install" or not kept), done.stderr
    found = server.get(f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceservices/fl-fairlead-test")
    assert (found is not None) is kept
    assert found is None or found["spec"].get("replicas", 1) == 1
    assert (server.get(f"/api/v1/namespaces/{namespace}/pods/fl-fairlead-test") is not None) is kept
    if kept:  # the next test creates its own
        with ends_pods(server, namespace, "Succeeded"):
            done = helm("test", "fl", "--namespace", namespace, "--timeout", "60s", kubeconfig=server.kubeconfig)
        assert done.returncode == 0, done.stderr
        eventually(lambda: server.get(f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceservices/fl-fairlead-test") is None)


def test_what_is_enabled_and_left_out_is_named_in_the_output_of_helm_template() -> None:
    enabled = ("template", "fl", str(CHART), "--set=monitoring.podMonitors=true")
    left_out = [line for line in helm(*enabled).stdout.splitlines() if line.startswith("# NOT rendered")]
    assert len(left_out) == 1 and "monitoring.podMonitors" in left_out[0]
    assert "NOT rendered" not in helm(*enabled, *everything()[:2]).stdout
