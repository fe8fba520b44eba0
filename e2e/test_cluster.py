"""The ground that every other e2e test stands on: pods run, Services and names work, RBAC is real, and nothing is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster, images
from e2e.cluster.local import LocalKubernetes

# Server and client are one small image: Debian with Python, built on this machine.
WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext: {runAsNonRoot: true, runAsUser: 65532}
      containers:
        - name: web
          image: IMAGE
          imagePullPolicy: Never
          command: [python3, -u, -m, http.server, "8000", --directory, /etc]
          readinessProbe: {httpGet: {path: /debian_version, port: 8000}, periodSeconds: 1}
          securityContext: {readOnlyRootFilesystem: true, allowPrivilegeEscalation: false}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8000}]}
---
apiVersion: v1
kind: Pod
metadata: {name: client}
spec:
  terminationGracePeriodSeconds: 1
  containers: [{name: client, image: IMAGE, imagePullPolicy: Never, command: [sleep, infinity]}]
"""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    image = images.base()
    cluster.load_image(image)
    cluster.kubectl("create", "namespace", "ground")
    cluster.kubectl("apply", "-n", "ground", "-f", "-", input=WEB.replace("IMAGE", image))
    yield "ground"
    cluster.kubectl("delete", "namespace", "ground", "--wait=false")


@pytest.fixture(scope="module")
def ready(cluster: Cluster, namespace: str) -> str:
    cluster.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    cluster.kubectl("wait", "-n", namespace, "pod/client", "--for=condition=Ready", "--timeout=60s")
    return namespace


def test_the_node_is_ready(cluster: Cluster) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json").stdout)["items"]
    conditions = {condition["type"]: condition["status"] for condition in nodes[0]["status"]["conditions"]}
    assert conditions["Ready"] == "True"


def test_a_service_is_reached_by_its_name_from_another_pod(cluster: Cluster, ready: str) -> None:
    for name in ("web", f"web.{ready}", f"web.{ready}.svc.cluster.local"):
        page = cluster.kubectl("exec", "-n", ready, "client", "--", "curl", "-sS", "--max-time", "5", f"http://{name}/debian_version")
        assert page.stdout.startswith("12.")


def test_a_pod_reaches_itself_through_its_service(cluster: Cluster, ready: str) -> None:
    page = cluster.kubectl("exec", "-n", ready, "deployment/web", "--", "curl", "-sS", "--max-time", "5", "http://web/debian_version")
    assert page.stdout.startswith("12.")


def test_an_unknown_name_fails_at_once(cluster: Cluster, ready: str) -> None:
    start = time.monotonic()
    answer = cluster.kubectl("exec", "-n", ready, "client", "--", "curl", "-sS", "http://nowhere.example/", check=False)
    assert "Could not resolve host" in answer.stderr
    assert time.monotonic() - start < 3


def test_logs_show_what_the_container_said(cluster: Cluster, ready: str) -> None:
    assert "GET /debian_version" in cluster.kubectl("logs", "-n", ready, "deployment/web").stdout


def test_a_pod_reaches_the_api_server_as_its_service_account_and_no_further(cluster: Cluster, ready: str) -> None:
    script = """
        cd /var/run/secrets/kubernetes.io/serviceaccount
        curl -sS --max-time 5 --cacert ca.crt -H "Authorization: Bearer $(cat token)" https://kubernetes.default.svc/api/v1/namespaces/%s/pods
    """
    answer = json.loads(cluster.kubectl("exec", "-n", ready, "client", "--", "sh", "-c", script % ready).stdout)
    assert answer["code"] == 403
    assert f"system:serviceaccount:{ready}:default" in answer["message"]


def test_a_role_allows_what_it_says_and_nothing_else(cluster: Cluster, ready: str) -> None:
    account = f"--as=system:serviceaccount:{ready}:reader"
    cluster.kubectl("create", "-n", ready, "serviceaccount", "reader")
    cluster.kubectl("create", "-n", ready, "role", "reader", "--verb=get,list", "--resource=pods")
    cluster.kubectl("create", "-n", ready, "rolebinding", "reader", "--role=reader", f"--serviceaccount={ready}:reader")
    assert "client" in cluster.kubectl("get", "pods", "-n", ready, account).stdout
    refused = cluster.kubectl("delete", "pod", "client", "-n", ready, account, check=False)
    assert "is forbidden" in refused.stderr


def test_the_test_process_reaches_services_from_the_clusters_network(cluster: Cluster, ready: str) -> None:
    if not cluster.reaches_pods:
        pytest.skip("this kind of cluster cannot be entered; its tests go through pods")
    address = cluster.kubectl("get", "service", "web", "-n", ready, "-o=jsonpath={.spec.clusterIP}").stdout
    page = cluster.exec_in_netns(["curl", "-sS", "--max-time", "5", f"http://{address}/debian_version"], capture_output=True)
    assert page.stdout.startswith("12.")
    with cluster.network():
        inside = Path("/proc/thread-self/ns/net").readlink()
        page = subprocess.run(["curl", "-sS", "--max-time", "5", f"http://{address}/debian_version"], capture_output=True, text=True)
    assert page.stdout.startswith("12.")
    assert Path("/proc/thread-self/ns/net").readlink() != inside


def _own_kubernetes_or_skip() -> None:
    if os.environ.get("KUBECONFIG") or os.geteuid() != 0:
        pytest.skip("only a cluster of our own is started and ended here, and that needs root")


def _traces(name: str) -> dict[str, list[str]]:
    """Everything on this machine that names the cluster: processes, mounts, files, control groups; and the network namespaces there are."""
    run = str(LocalKubernetes(name).run)
    processes, networks = [], set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            networks.add(str((process / "ns" / "net").readlink()))
            if run in (process / "cmdline").read_text():
                processes.append((process / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    folders = ("/var/lib/cni", "/var/lib/kubelet", "/var/log/pods", "/var/log/containers", "/run/netns", "/run/containerd", "/usr/libexec/kubernetes")
    return {
        "processes": processes,
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if run in line],
        "files": [run] * Path(run).exists() + [str(path) for folder in folders for path in [Path(folder), *Path(folder).glob("*")] if path.exists()],
        "cgroups": [str(path) for pattern in ("*", "*/*") for path in Path("/sys/fs/cgroup").glob(f"{pattern}") if path.name == f"fairlead-{name}"],
        "networks": sorted(networks),
        "tunables": [Path(f"/proc/sys/{name}").read_text() for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")],
    }


def test_down_leaves_nothing_also_after_a_start_that_died_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _own_kubernetes_or_skip()
    kubernetes = LocalKubernetes("halfway")
    before = _traces("halfway")

    with monkeypatch.context() as patch:  # as if this process had been killed in the middle of a start: nothing cleans up after it
        patch.setattr(kubernetes, "_wait", lambda component, *_: (_ for _ in ()).throw(KeyboardInterrupt) if component == "kubelet" else time.sleep(2))
        patch.setattr(kubernetes.machine, "stop", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            kubernetes.up()
    assert _traces("halfway")["processes"], "the half-started cluster should still be there"

    again = LocalKubernetes("halfway")
    again.up()
    again.up()
    assert again.running
    again.down(purge=True)
    assert _traces("halfway") == before
    again.down()


def test_a_component_that_dies_is_named_with_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    _own_kubernetes_or_skip()
    from e2e.cluster import components, local

    commands = components.commands

    def with_a_bad_flag(layout: components.Layout) -> dict[str, list[str]]:
        found = commands(layout)
        return {**found, "kubelet": [*found["kubelet"], "--no-such-flag"]}

    monkeypatch.setattr(components, "commands", with_a_bad_flag)
    before = _traces("broken")
    with pytest.raises(local.ComponentFailed, match=r"(?s)kubelet ended with code 1.*unknown flag: --no-such-flag"):
        LocalKubernetes("broken").up()
    LocalKubernetes("broken").down(purge=True)
    assert _traces("broken") == before
