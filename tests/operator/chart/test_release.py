"""A release with the real helm on a real API server: installed, and removed without a trace."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.operator.support import apiserver, foreign_crds
from tests.operator.support.chart import CHART, everything, helm
from tests.operator.support.cluster import Cluster, eventually, wait_for_crds
from tests.operator.support.manifests import manifest

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


def test_a_service_among_the_extra_objects_comes_after_the_crd(alone: apiserver.ApiServer, tmp_path: Path) -> None:
    """First in this file: Helm keeps what the server served before."""
    described = json.loads((CHART / "values.schema.json").read_text())["properties"]["extraObjects"]["description"]
    assert "after the first install" in described and "--take-ownership" in described
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps({"crds": {"keep": False}, "extraObjects": [manifest("qwen", HOME)]}))
    first = helm("install", "fl", str(CHART), "-f", str(values), "--namespace", HOME, kubeconfig=alone.kubeconfig)
    assert first.returncode != 0 and "ensure CRDs are installed first" in first.stderr
    assert not objects(alone), "nothing is installed half-way"
    helmed(alone, "uninstall", "fl", "--ignore-not-found")

    helmed(alone, "install", "fl", str(CHART), "--set=crds.keep=false", "--create-namespace")
    wait_for_crds(alone)
    helmed(alone, "upgrade", "fl", str(CHART), "-f", str(values))
    cluster = Cluster(alone, HOME)
    assert cluster.get("inferenceservices", "qwen")["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    helmed(alone, "uninstall", "fl")
    eventually(lambda: alone.get(CRD) is None)

    applied = alone.kubectl("apply", "--server-side", "-f", str(CHART.parents[1] / "crds"))
    assert applied.returncode == 0, applied.stderr
    wait_for_crds(alone)
    helmed(alone, "install", "fl", str(CHART), "-f", str(values), "--take-ownership")
    assert cluster.get("inferenceservices", "qwen") is not None
    helmed(alone, "uninstall", "fl")
    eventually(lambda: alone.get(CRD) is None)


def test_services_stay_unless_they_or_the_crd_are_deleted_though_no_operator_runs(alone: apiserver.ApiServer) -> None:
    helmed(
        alone,
        "install",
        "fl",
        str(CHART),
        "--create-namespace",
        *everything()[2:],
        "--set=monitoring.podMonitors=false,monitoring.rules=false",
    )
    wait_for_crds(alone)
    cluster = Cluster(alone, "default")
    cluster.create(replicas=2)
    helmed(alone, "uninstall", "fl")
    assert not objects(alone), "the release leaves nothing but its CRD"
    assert alone.get(CRD) is not None and cluster.get("inferenceservices", "qwen") is not None, "people's services stay (crds.keep)"
    path = cluster.path("inferenceservices", "qwen")
    assert alone.request("DELETE", path)[0] == 200 and alone.get(path) is None

    helmed(alone, "install", "fl", str(CHART), "--set=crds.keep=false")
    eventually(lambda: "helm.sh/resource-policy" not in (alone.get(CRD)["metadata"].get("annotations") or {}))
    body = manifest("qwen", "default")
    eventually(lambda: alone.request("POST", cluster.path("inferenceservices"), body)[0] == 201)  # the first release's policy has gone
    helmed(alone, "uninstall", "fl")
    eventually(lambda: alone.get(CRD) is None), "no finalizer of ours holds a service, with no operator running"
    assert not objects(alone)


def test_monitoring_comes_with_the_crds_of_the_prometheus_operator(alone: apiserver.ApiServer) -> None:
    """Discovered by helm itself, and taken by the real schemas."""
    wanted = ("--set=monitoring.podMonitors=true,monitoring.rules=true,monitoring.dashboards=true", "--set=crds.keep=false")
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
