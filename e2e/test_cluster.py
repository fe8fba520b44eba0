"""What every other e2e test relies on: pods run, Services and DNS work, RBAC is enforced, and nothing is left afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.cluster import Cluster
from e2e.cluster.cluster import LocalCluster
from e2e.cluster.local import LocalKubernetes

# Server and client use one small image: Debian with Python, built on this machine.
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
          imagePullPolicy: IfNotPresent
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
  containers: [{name: client, image: IMAGE, imagePullPolicy: IfNotPresent, command: [sleep, infinity]}]
"""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    cluster.kubectl("create", "namespace", "basics")
    cluster.kubectl("apply", "-n", "basics", "-f", "-", input=WEB.replace("IMAGE", cluster.base_image()))
    yield "basics"
    cluster.kubectl("delete", "namespace", "basics", "--wait=false")


@pytest.fixture(scope="module")
def ready(cluster: Cluster, namespace: str) -> str:
    cluster.kubectl("rollout", "status", "-n", namespace, "deployment/web", "--timeout=60s")
    cluster.kubectl("wait", "-n", namespace, "pod/client", "--for=condition=Ready", "--timeout=60s")
    return namespace


def _eventually(cluster: Cluster, *arguments: str, seconds: float = 10) -> str:
    """Return the output of kubectl once it succeeds: on any Kubernetes, a Service lags behind its endpoints."""
    deadline = time.monotonic() + seconds
    while True:
        result = cluster.kubectl(*arguments, check=time.monotonic() > deadline)
        if result.returncode == 0:
            return result.stdout
        time.sleep(0.1)


def _fetch(url: str) -> list[str]:
    return ["python3", "-c", f"import urllib.request; print(urllib.request.urlopen('{url}', timeout=5).read().decode())"]


def test_a_service_is_reached_by_its_name_from_another_pod(cluster: Cluster, ready: str) -> None:
    for name in ("web", f"web.{ready}", f"web.{ready}.svc.cluster.local"):
        page = _eventually(cluster, "exec", "-n", ready, "client", "--", *_fetch(f"http://{name}/debian_version"))
        assert page.startswith("12.")


def test_a_pod_reaches_itself_through_its_service(cluster: Cluster, ready: str) -> None:
    page = _eventually(cluster, "exec", "-n", ready, "deployment/web", "--", *_fetch("http://web/debian_version"))
    assert page.startswith("12.")


def test_an_unknown_name_fails_at_once(cluster: Cluster, ready: str) -> None:
    start = time.monotonic()
    answer = cluster.kubectl("exec", "-n", ready, "client", "--", *_fetch("http://nowhere.example/"), check=False)
    assert "Name or service not known" in answer.stderr
    assert time.monotonic() - start < 3


def test_a_pod_reaches_the_api_server_as_its_service_account_without_rights(cluster: Cluster, ready: str) -> None:
    script = """if True:
        import ssl, urllib.error, urllib.request
        folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
        request = urllib.request.Request("https://kubernetes.default.svc/api/v1/namespaces/NAMESPACE/pods")
        request.add_header("Authorization", "Bearer " + open(folder + "token").read())
        try:
            urllib.request.urlopen(request, timeout=5, context=ssl.create_default_context(cafile=folder + "ca.crt"))
        except urllib.error.HTTPError as refused:
            print(refused.read().decode())
    """
    script = script.replace("NAMESPACE", ready)
    answer = json.loads(cluster.kubectl("exec", "-n", ready, "client", "--", "python3", "-c", script).stdout)
    assert answer["code"] == 403
    assert f"system:serviceaccount:{ready}:default" in answer["message"]


def test_the_test_process_reaches_services_from_the_clusters_network(cluster: Cluster, ready: str) -> None:
    if not cluster.reaches_pods:
        pytest.skip("this kind of cluster has no network namespace to enter")
    address = cluster.kubectl("get", "service", "web", "-n", ready, "-o=jsonpath={.spec.clusterIP}").stdout
    page = cluster.exec_in_netns(["curl", "-sS", "--max-time", "5", f"http://{address}/debian_version"], capture_output=True)
    assert page.stdout.startswith("12.")
    with cluster.network():
        inside = Path("/proc/thread-self/ns/net").readlink()
        page = subprocess.run(["curl", "-sS", "--max-time", "5", f"http://{address}/debian_version"], capture_output=True, text=True)
    assert page.stdout.startswith("12.")
    assert Path("/proc/thread-self/ns/net").readlink() != inside


def _skip_unless_local() -> None:
    if os.environ.get("KUBECONFIG") or os.geteuid() != 0:
        pytest.skip("this test starts a cluster on this machine, which needs root and no KUBECONFIG")


_SHARED_FOLDERS = (
    *("/var/lib/cni", "/var/lib/kubelet", "/var/log/pods", "/var/log/containers"),
    *("/run/netns", "/run/containerd", "/run/flannel", "/opt/cni", "/usr/libexec/kubernetes"),
)


def _traces(name: str) -> dict[str, list[str]]:
    """Return everything that a cluster could leave or change on this machine, for a comparison before and after."""
    run = str(LocalKubernetes(name).run)
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if run in command:
            processes.append(command)
    folders = [Path(folder) for folder in (run, *_SHARED_FOLDERS)]
    return {
        "processes": processes,
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if run in line],
        "files": [str(path) for folder in folders for path in (folder, *folder.glob("*")) if path.exists()],
        "control groups": [str(path) for pattern in ("*", "*/*") for path in Path("/sys/fs/cgroup").glob(f"{pattern}/fairlead-{name}")],
        "links": sorted(path.name for path in Path("/sys/class/net").iterdir()),
        "tunables": [Path(f"/proc/sys/{name}").read_text() for name in ("vm/overcommit_memory", "kernel/panic", "net/ipv4/ip_forward")],
    }


def _network_namespaces() -> set[str]:
    listed = subprocess.run(["lsns", "--type=net", "--noheadings", "--output=NS,COMMAND"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in listed.stdout.splitlines() if "pause" in line}  # lsns draws a tree before some commands


@pytest.mark.long
def test_down_leaves_nothing_even_after_an_interrupted_start(monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_unless_local()
    kubernetes = LocalKubernetes("halfway")
    before, networks = _traces("halfway"), _network_namespaces()

    def interrupt_at_the_kubelet(component: str, condition: Callable[[], bool], *_: str) -> None:
        if component == "kubelet":
            raise KeyboardInterrupt
        while not condition():
            time.sleep(0.1)

    with monkeypatch.context() as patch:  # as if this process had been killed during a start: nothing cleans up
        patch.setattr(kubernetes, "_wait", interrupt_at_the_kubelet)
        patch.setattr(kubernetes.machine, "stop", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            kubernetes.up()
    assert _traces("halfway")["processes"], "the interrupted cluster is expected to run"

    again = LocalKubernetes("halfway")
    again.up()
    again.up()
    assert again.running
    local = LocalCluster(again)
    local.kubectl("apply", "-f", "-", input=WEB.replace("IMAGE", local.base_image()))
    local.kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    again.down(purge=True)
    assert _traces("halfway") == before
    assert not _network_namespaces() - networks, "pods of another cluster may end meanwhile, so compare only what is new"
    again.down()


@pytest.mark.long
def test_a_failed_component_is_named_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_unless_local()
    from e2e.cluster import components, local

    commands = components.commands

    def add_bad_flag(layout: components.Layout) -> dict[str, list[str]]:
        found = commands(layout)
        return {**found, "kubelet": [*found["kubelet"], "--no-such-flag"]}

    monkeypatch.setattr(components, "commands", add_bad_flag)
    before = _traces("broken")
    with pytest.raises(local.ComponentFailed, match=r"(?s)kubelet ended with code 1.*unknown flag: --no-such-flag"):
        LocalKubernetes("broken").up()
    LocalKubernetes("broken").down(purge=True)
    assert _traces("broken") == before
