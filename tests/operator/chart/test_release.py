"""A release with the real helm on a real API server: upgraded from the last release, and removed without a trace."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.support import apiserver, foreign_crds
from tests.operator.support.apiserver import wait_for_crd
from tests.operator.support.chart import CHART, everything, helm
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.kube.kinds import kind_of
from fairlead_operator.names import FIELD_MANAGER

PREVIOUS = Path(__file__).parents[1] / "data" / "fairlead-0.1.0.tgz"  # the chart of 0.1.0, with the present names of CRD fields
CHILDREN = PREVIOUS.with_name("children-0.1.0.json")  # of a service of two replicas, as the operator beside that chart applied them
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferenceservices.fairlead.dev"
HOME = "fairlead-system"


@pytest.fixture(scope="module")
def alone() -> Iterator[apiserver.ApiServer]:
    """A server of its own, since the chart installs and removes the CRD."""
    problem = apiserver.missing()
    if problem:
        pytest.skip(problem)
    with apiserver.start() as running:
        yield running


def objects(server: apiserver.ApiServer, *namespaces: str) -> set[tuple[str, str]]:
    """Kind and name of everything of the release that exists."""
    plurals = (
        "deployments",
        "services",
        "serviceaccounts",
        "configmaps",
        "networkpolicies",
        "poddisruptionbudgets",
        "roles",
        "rolebindings",
    )
    everywhere = ("clusterroles", "clusterrolebindings", "validatingadmissionpolicies", "validatingadmissionpolicybindings")
    done = server.kubectl("get", ",".join((*plurals, *everywhere)), "-A", "-l", "app.kubernetes.io/instance=fl", "-o", "name")
    assert done.returncode == 0, done.stderr
    return {tuple(line.split("/", 1)) for line in done.stdout.split()}  # type: ignore[misc]


def helmed(server: apiserver.ApiServer, *arguments: str) -> str:
    done = helm(*arguments, "--namespace", HOME, kubeconfig=server.kubeconfig)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_upgrade_from_the_last_release_and_uninstall(
    alone: apiserver.ApiServer, router: StubRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(alone.kubeconfig))
    helmed(alone, "install", "fl", str(PREVIOUS), "--create-namespace")
    wait_for_crd(alone)
    eventually(lambda: "exposure" not in crd_fields(alone))
    old = objects(alone)
    cluster = Cluster(alone, "default")
    cluster.create(replicas=2)
    applied_by_the_last_release(cluster)
    before = {component: cluster.get("deployments", f"qwen-{component}")["spec"]["template"] for component in ("worker", "router")}
    assert before["worker"]["spec"]["containers"][0]["image"] == "worker:0.1.0"

    helmed(alone, "upgrade", "fl", str(CHART), *everything()[2:], "--set=monitoring.podMonitors=false", "--set=monitoring.rules=false")
    assert old < objects(alone), "nothing went, something came"
    eventually(lambda: "exposure" in crd_fields(alone))
    kept = eventually(lambda: cluster.get("inferenceservices", "qwen"))
    assert (
        kept["spec"]["replicas"] == 2 and eventually(lambda: cluster.get("inferenceservices", "qwen")["spec"]["exposure"])["networkPolicy"]
    )
    with run_operator(alone.kubeconfig, "default", router.url):
        eventually(lambda: alone.get("/apis/networking.k8s.io/v1/namespaces/default/networkpolicies/qwen-worker"))
        eventually(lambda: cluster.get("inferenceservices", "qwen").get("status", {}).get("observedGeneration"))
        after = {component: cluster.get("deployments", f"qwen-{component}")["spec"]["template"] for component in before}
        assert after == before, "an upgrade restarts no pod: its image and flags are those of the last release"

    helmed(alone, "uninstall", "fl")
    assert not objects(alone), "the release leaves nothing but its CRD"
    assert alone.get(CRD) is not None and cluster.get("inferenceservices", "qwen") is not None, "people's services stay (crds.keep)"

    helmed(alone, "install", "fl", str(CHART), "--set=crds.keep=false")
    eventually(lambda: "helm.sh/resource-policy" not in (alone.get(CRD)["metadata"].get("annotations") or {}))
    helmed(alone, "uninstall", "fl")
    eventually(lambda: alone.get(CRD) is None), "no finalizer of ours holds a service, with no operator running"
    assert not objects(alone)


def applied_by_the_last_release(cluster: Cluster) -> None:
    uid = cluster.get("inferenceservices", "qwen")["metadata"]["uid"]
    for child in json.loads(CHILDREN.read_text().replace('"UID"', f'"{uid}"')):
        path = kind_of(child).path(cluster.namespace, child["metadata"]["name"])
        code, answer = cluster.server.request("PATCH", f"{path}?fieldManager={FIELD_MANAGER}", child, "application/apply-patch+yaml")
        assert code in (200, 201), answer


def crd_fields(server: apiserver.ApiServer) -> Any:
    (version,) = server.get(CRD)["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]


def test_monitoring_comes_with_the_crds_of_the_prometheus_operator(alone: apiserver.ApiServer) -> None:
    """Discovered by helm itself, and taken by the real schemas."""
    wanted = ("--set=monitoring.podMonitors=true", "--set=monitoring.rules=true", "--set=monitoring.dashboards=true")
    crds = [foreign_crds.crd(*which) for which in (foreign_crds.POD_MONITORS, foreign_crds.RULES)]
    paths = [f"/apis/monitoring.coreos.com/v1/namespaces/{HOME}/{plural}" for plural in ("podmonitors", "prometheusrules")]
    told = helmed(alone, "install", "fl", str(CHART), "--create-namespace", *wanted)
    assert "NOT installed: PodMonitors" in told and "NOT installed: the PrometheusRule" in told
    for crd in crds:
        alone.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", crd)
    eventually(lambda: all(alone.request("GET", path)[0] == 200 for path in paths))
    assert "NOT installed" not in helmed(alone, "upgrade", "fl", str(CHART), *wanted)
    assert [len(alone.get(path)["items"]) for path in paths] == [2, 1]
    helmed(alone, "uninstall", "fl")
    assert [len(alone.get(path)["items"]) for path in paths] == [0, 0]


def test_a_deleted_service_is_gone_though_no_operator_runs(alone: apiserver.ApiServer) -> None:
    helmed(alone, "install", "fl", str(CHART), "--set=crds.keep=false")
    wait_for_crd(alone)
    path = "/apis/fairlead.dev/v1alpha1/namespaces/default/inferenceservices"
    alone.create(path, manifest("qwen", "default"))
    assert alone.request("DELETE", f"{path}/qwen")[0] == 200 and alone.get(f"{path}/qwen") is None
    helmed(alone, "uninstall", "fl")


def test_two_releases_of_one_name_in_one_cluster(alone: apiserver.ApiServer) -> None:
    """Each for its own namespace, the second without the CRD. Neither's removal takes an object of the other."""

    def run(action: str, team: str, *arguments: str) -> None:
        done = helm(action, "fl", *arguments, "--namespace", f"home-{team}", kubeconfig=alone.kubeconfig)
        assert done.returncode == 0, done.stderr

    for team in "ab":
        alone.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"team-{team}"}})
        crds = "crds.keep=false" if team == "a" else "crds.install=false"
        flags = f"--set=watch.namespaces[0]=team-{team},admissionPolicy.enabled=true,{crds}"
        run("install", team, str(CHART), "--create-namespace", flags)
    both = objects(alone)
    run("uninstall", "b")
    left = objects(alone)
    assert left < both and alone.get(CRD) is not None
    bindings = alone.get("/apis/rbac.authorization.k8s.io/v1/namespaces/team-a/rolebindings")["items"]
    assert [(one["subjects"][0]["name"], one["subjects"][0]["namespace"]) for one in bindings] == [("fl-fairlead-operator", "home-a")]
    run("uninstall", "a")
    assert not objects(alone)
    eventually(lambda: alone.get(CRD) is None)


def test_the_last_releases_values_can_be_reused(alone: apiserver.ApiServer) -> None:
    helmed(alone, "install", "fl", str(PREVIOUS), "--create-namespace", "--set=crds.keep=false,clusterDomain=kept.example")
    helmed(alone, "upgrade", "fl", str(CHART), "--reset-then-reuse-values")
    operator = alone.get("/apis/apps/v1/namespaces/fairlead-system/deployments/fl-fairlead-operator")
    assert "--cluster-domain=kept.example" in operator["spec"]["template"]["spec"]["containers"][0]["args"]
    helmed(alone, "uninstall", "fl")
