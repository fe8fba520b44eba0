"""docs/reference/api-versions.md: how v1 takes the place of v1alpha1, on a real API server, while the operator runs."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from tests.operator.support import apiserver
from tests.operator.support.cluster import CRDS, Cluster, eventually, install_crds
from tests.operator.support.manifests import manifest
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead_operator.api.crd import custom_resource_definition

NAME = "inferenceservices.fairlead.dev"
PATH = "/apis/fairlead.dev/{}/namespaces/default/inferenceservices"


@pytest.fixture
def alone() -> Iterator[apiserver.ApiServer]:
    """A server of its own, since the versions of the CRD change."""
    problem = apiserver.missing()
    if problem:
        pytest.skip(problem)
    with apiserver.start() as running:
        yield running


def with_v1(*, storage: str, served: tuple[str, ...]) -> dict[str, Any]:
    """The CRD of a release with both versions. Their schemas are the same, so no webhook converts."""
    crd = custom_resource_definition()
    (alpha,) = crd["spec"]["versions"]
    versions = [alpha, {**copy.deepcopy(alpha), "name": "v1"}]
    crd["spec"]["versions"] = [
        {**one, "storage": one["name"] == storage, "served": one["name"] in served} for one in versions if one["name"] in (storage, *served)
    ]
    crd["spec"]["conversion"] = {"strategy": "None"}
    return crd


def update(server: apiserver.ApiServer, crd: dict[str, Any]) -> None:
    version = server.get(f"{CRDS}/{NAME}")["metadata"]["resourceVersion"]
    code, answer = server.request("PUT", f"{CRDS}/{NAME}", {**crd, "metadata": {**crd["metadata"], "resourceVersion": version}})
    assert code == 200, answer


def test_a_stored_service_becomes_v1_without_a_restart(alone: apiserver.ApiServer, router: StubRouter) -> None:
    install_crds(alone)
    cluster = Cluster(alone, "default")
    with run_operator(alone.kubeconfig, "default", router.url):
        stored = cluster.create(replicas=2, engine={"maxNumSeqs": 7})
        before = eventually(lambda: cluster.get("deployments", "qwen-worker"))

        update(alone, with_v1(storage="v1alpha1", served=("v1alpha1", "v1")))  # 1: both are served, the earlier one is stored
        eventually(lambda: alone.request("GET", PATH.format("v1"))[0] == 200)
        as_v1 = alone.get(f"{PATH.format('v1')}/qwen")
        assert as_v1["spec"] == stored["spec"] and as_v1["metadata"]["uid"] == stored["metadata"]["uid"]

        update(alone, with_v1(storage="v1", served=("v1alpha1", "v1")))  # 2: new writes are stored as v1
        eventually(lambda: alone.get(f"{CRDS}/{NAME}")["status"]["storedVersions"] == ["v1alpha1", "v1"])
        done = alone.kubectl("get", "inferenceservices.v1.fairlead.dev", "-A", "-o", "json")
        done = alone.kubectl("replace", "-f", "-", stdin=done.stdout)  # 3: each object is written once, and so stored as v1
        assert done.returncode == 0, done.stderr
        code, answer = alone.request(
            "PATCH", f"{CRDS}/{NAME}/status", {"status": {"storedVersions": ["v1"]}}, "application/merge-patch+json"
        )
        assert code == 200, answer

        body = manifest("late", "default")
        alone.create(PATH.format("v1"), {**body, "apiVersion": "fairlead.dev/v1"})  # a user of v1, beside an operator of v1alpha1
        eventually(lambda: cluster.get("deployments", "late-worker"))
        after = cluster.get("deployments", "qwen-worker")
        assert after["spec"] == before["spec"] and after["metadata"]["uid"] == before["metadata"]["uid"], "no pod was replaced"
        assert cluster.get("deployments", "late-worker")["metadata"]["ownerReferences"][0]["apiVersion"] == "fairlead.dev/v1alpha1"

    update(alone, with_v1(storage="v1", served=("v1",)))  # 4: a later release serves v1 only
    eventually(lambda: alone.request("GET", PATH.format("v1alpha1"))[0] == 404)
    kept = alone.get(f"{PATH.format('v1')}/qwen")
    assert kept["spec"] == stored["spec"] and kept["metadata"]["uid"] == stored["metadata"]["uid"]
