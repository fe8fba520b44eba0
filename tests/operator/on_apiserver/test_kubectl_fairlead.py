"""`kubectl fairlead` on a real API server: the table, why a service is not ready, exit codes, and errors of missing permissions."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import container, deployment, manifest

from fairlead.kube import api, plugin
from fairlead.kube.explain import explain
from fairlead.kube.facts import Facts
from fairlead.main import main as fairlead

NO_GPU = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
}


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str, of: Any = plugin.main) -> tuple[int, str, str]:
        """Exit status, stdout (spaces as one) and stderr."""
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            of(list(arguments))
        said = self._capsys.readouterr()
        assert isinstance(left.value.code, int)
        return left.value.code, re.sub(r"[ \n]+", " ", said.out), said.err


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def waiting_pod(cluster: Cluster, name: str, gpus: int = 1) -> None:
    """A worker's pod that requests GPUs and fits on no node."""
    labels = eventually(lambda: cluster.get("deployments", "qwen-worker"))["spec"]["template"]["metadata"]["labels"]
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec = {"containers": [{"name": "worker", "image": "worker:1", "resources": limits}], "automountServiceAccountToken": False}
    cluster.server.create(
        cluster.path("pods"), {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    )
    cluster.patch("pods", name, {"status": {"phase": "Pending", "conditions": [NO_GPU]}}, "status")


def test_the_table_shows_services_pods_and_why(cluster: Cluster, shell: Shell) -> None:
    assert shell("status", "-n", cluster.namespace)[:2] == (
        1,
        f"no InferenceServices in namespace {cluster.namespace}. examples/ has manifests to start with. ",
    )
    cluster.create()
    cluster.play_controllers(workers_ready=False)
    waiting_pod(cluster, "qwen-worker-a")
    eventually(lambda: cluster.ready().get("reason") == "FailedScheduling")
    code, out, _ = shell("status", "-n", cluster.namespace)
    assert code == 1 and "qwen 0/1 FailedScheduling" in out and "└ qwen-worker-a FailedScheduling" in out
    assert "set spec.resources.gpus: 0" in out
    cluster.server.request("DELETE", cluster.path("pods", "qwen-worker-a") + "?gracePeriodSeconds=0")
    cluster.play_controllers()
    eventually(lambda: cluster.ready().get("status") == "True")
    code, out, _ = shell("status", "-n", cluster.namespace, of=fairlead)
    assert code == 0 and "qwen 1/1 Serving" in out
    code, text, _ = shell("status", "-A", "-o", "json")
    (mine,) = [one for one in json.loads(text) if one["namespace"] == cluster.namespace]
    assert mine["ready"] and mine["reason"] == "Serving" and mine["conditions"]["WeightsReady"] == "True"
    assert shell("status", "qwen", "-n", cluster.namespace)[0] == 0
    code, _, err = shell("status", "qwem", "-n", cluster.namespace)
    assert code == 2 and "no InferenceService qwem" in err and "there are: qwen" in err


def test_explain_walks_from_the_service_to_the_nodes(cluster: Cluster, shell: Shell) -> None:
    name = f"node-{cluster.namespace}"
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    cluster.server.create("/api/v1/nodes", node)
    body = {"status": {"allocatable": {"nvidia.com/gpu": "2"}, "capacity": {"nvidia.com/gpu": "2"}}}
    cluster.server.request("PATCH", f"/api/v1/nodes/{name}/status", body, "application/merge-patch+json")
    cluster.create(model={"secretRef": {"name": "hub"}, "cache": {"persistentVolumeClaim": {"claimName": "weights"}}})
    cluster.play_controllers(workers_ready=False)
    waiting_pod(cluster, "qwen-worker-a")
    eventually(lambda: cluster.ready().get("reason") == "FailedScheduling")
    code, out, _ = shell("explain", "qwen", "-n", cluster.namespace)
    assert code == 1 and f"qwen in namespace {cluster.namespace} is not ready" in out
    assert "✗ Secret hub (spec.model.secretRef): does not exist" in out
    assert "✗ PersistentVolumeClaim weights (spec.model.cache.persistentVolumeClaim): does not exist" in out
    assert "Deployment qwen-worker wants 1: 0 ready" in out and "✗ pod qwen-worker-a: FailedScheduling" in out
    assert f"{name}: 2 GPUs, 2 free, taints" in out, "the API server taints a node that no kubelet has reported"
    assert "Create it in this namespace" in out.partition("what to do next")[2] and "Free a GPU" in out.partition("what to do next")[2]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "hf_secret"}}
    cluster.server.create(cluster.path("secrets"), secret)
    code, text, _ = shell("explain", "qwen", "-n", cluster.namespace, "-o", "json")
    story = json.loads(text)
    assert {"text": "Secret hub (spec.model.secretRef): exists", "ok": True} in story["sections"]["needs"]
    assert "hf_secret" not in text and "aGZfc2VjcmV0" not in text
    cluster.server.request("DELETE", f"/api/v1/nodes/{name}")


def test_explain_tells_events_of_a_pod_that_hangs_before_the_status_does(cluster: Cluster, shell: Shell) -> None:
    cluster.create()
    cluster.play_controllers(workers_ready=False)
    creating = {"phase": "Pending", "containerStatuses": [{**container({"waiting": {"reason": "ContainerCreating"}}), "imageID": ""}]}
    cluster.play_kubelet("qwen-worker-a", creating)
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "e-", "namespace": cluster.namespace}, "type": "Warning"}
    event |= {"reason": "FailedMount", "message": 'secret "keys" not found', "count": 7, "lastTimestamp": "2026-01-01T00:00:00Z"}
    involved = {"kind": "Pod", "apiVersion": "v1", "name": "qwen-worker-a", "namespace": cluster.namespace}
    cluster.server.create(cluster.path("events"), event | {"involvedObject": involved})
    code, out, _ = shell("explain", "qwen", "-n", cluster.namespace)
    assert code == 1 and "is not ready: FailedMount" in out and "7 times, Pod qwen-worker-a: FailedMount" in out
    assert "Create the Secret keys in this namespace" in out.partition("what to do next")[2]


def test_explain_tells_the_canary_and_what_its_deployment_is_refused() -> None:
    body = manifest("qwen", "default") | {"status": {"canary": {"revision": "qwen-abc", "phase": "Starting", "trafficPercent": 10}}}
    trial = deployment("worker", 1, ready=0)
    trial["metadata"] = {**trial.get("metadata", {}), "name": "qwen-worker-canary"}
    trial["status"]["conditions"] = [
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    ]
    facts = Facts(service=body, deployments={"worker-canary": trial})
    story = explain(facts, datetime(2026, 1, 1, tzinfo=UTC))
    assert [line.text for line in story.sections["canary"]] == [
        "Starting, revision qwen-abc, 10 % of the requests",
        "Deployment qwen-worker-canary wants 1: 0 ready, 1 of the desired revision",
    ]
    assert any("quota" in said for said in story.next)


def test_explain_tells_that_services_share_a_redis_login() -> None:
    index = {
        "state": "Available",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "credentials": "Shared",
        "credentialsMessage": "NOPERM this user may not run acl|setuser",
    }
    told = [
        explain(Facts(service=manifest("qwen", "default") | {"status": {"index": {**index, **more}}}), datetime(2026, 1, 1, tzinfo=UTC))
        for more in ({}, {"credentials": "PerService"})
    ]
    shared, own = (" ".join(line.text for line in story.sections["service"]) for story in told)
    assert "one Redis login for all services: NOPERM" in shared and "login" not in own


def account(server: apiserver.ApiServer, namespace: str, folder: Path, *rules: Any) -> Path:
    """A kubeconfig of a ServiceAccount that may do no more than `rules` in its namespace."""
    core, rbac = f"/api/v1/namespaces/{namespace}", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    server.create(f"{core}/serviceaccounts", {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "someone"}})
    group = "rbac.authorization.k8s.io"
    server.create(f"{rbac}/roles", {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": "some"}, "rules": list(rules)})
    binding = {"apiVersion": f"{group}/v1", "kind": "RoleBinding", "metadata": {"name": "some"}}
    binding |= {"roleRef": {"apiGroup": group, "kind": "Role", "name": "some"}}
    binding |= {"subjects": [{"kind": "ServiceAccount", "name": "someone", "namespace": namespace}]}
    server.create(f"{rbac}/rolebindings", binding)
    ask = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
    token = server.create(f"{core}/serviceaccounts/someone/token", ask)["status"]["token"]
    config = json.loads(server.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = token
    config["contexts"][0]["context"]["namespace"] = namespace
    path = folder / "someone.kubeconfig"
    path.write_text(json.dumps(config))
    return path


def test_a_ready_service_is_told_without_figures_and_without_rights_too(cluster: Cluster, shell: Shell, tmp_path: Path) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "stringData": {"token": "hf_secret"}}
    cluster.server.create(cluster.path("secrets"), secret)
    cluster.create(model={"secretRef": {"name": "hub"}})
    cluster.play_controllers()
    eventually(lambda: cluster.ready().get("status") == "True")
    code, out, _ = shell("explain", "qwen", "-n", cluster.namespace)
    assert code == 0 and "is ready" in out and "✓ Ready True" in out and "Nothing: the service is ready" in out
    code, out, _ = shell("top", "--once", "--interval", "0.1", "-n", cluster.namespace)
    assert code == 0 and "TOKENS/S" in out and "qwen 1/1 Serving" in out

    other = f"{cluster.namespace}-unwatched"
    cluster.server.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": other}})
    cluster.server.create(f"/apis/fairlead.dev/v1alpha1/namespaces/{other}/inferenceservices", manifest("qwen", other))
    code, out, _ = shell("explain", "qwen", "-n", other)
    assert code == 1 and "no operator has seen it" in out and "Check that fairlead-operator runs" in out

    rule = {"apiGroups": ["fairlead.dev"], "resources": ["inferenceservices"], "verbs": ["get", "list"]}
    config = str(account(cluster.server, cluster.namespace, tmp_path, rule))
    code, out, _ = shell("status", "--kubeconfig", config)
    assert code == 0 and "qwen 1/1 Serving" in out and "you may not list pods" in out
    code, out, _ = shell("explain", "qwen", "--kubeconfig", config)
    assert code == 0 and "list pods: not permitted; ask" in out and "get secrets" in out
    code, _, err = shell("status", "-A", "--kubeconfig", config)
    assert code == 2 and "you may not list inferenceservices.fairlead.dev in all namespaces (or name one with -n)" in err

    ready = {"phase": "Running", "podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}], "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.play_kubelet("qwen-router-x", ready, "router")
    code, out, _ = shell("status", "-n", cluster.namespace)
    assert code == 0 and "└ qwen-router-x Ready" in out and "no live figures:" in out, "the API server does not reach the router"


def test_errors_say_what_is_missing(
    server: apiserver.ApiServer, namespace: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads(server.kubeconfig.read_text())
    config["users"][0]["user"]["token"] = "wrong"
    (tmp_path / "wrong").write_text(json.dumps(config))
    assert "rejects the credentials of context test" in shell("status", "--kubeconfig", str(tmp_path / "wrong"))[2]
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp_path / "away").write_text(json.dumps(config))
    code, _, err = shell("status", "--kubeconfig", str(tmp_path / "away"))
    assert code == 2 and "127.0.0.1:9 cannot be reached" in err and "\n" not in err.strip()
    code, _, err = shell("explain", "x", "--context", "nowhere", "--kubeconfig", str(server.kubeconfig))
    assert code == 2 and "nowhere" in err
    assert "give only one of them" in shell("status", "--url", "http://x", "-n", "y", of=fairlead)[2]
    assert "give -n NAMESPACE" in shell("status", "qwen", "-A", "--kubeconfig", str(server.kubeconfig))[2]
    monkeypatch.setattr(api, "SERVICES", "/apis/fairlead.dev/v1alpha0")
    code, _, err = shell("status", "-n", namespace, "--kubeconfig", str(server.kubeconfig))
    assert code == 2 and "the CRD inferenceservices.fairlead.dev is not installed" in err
