"""A profile that appears, changes or goes wakes the services that name it, and a running service survives its loss."""

import copy
from typing import Any

import pytest
from tests.operator.profiles.test_merge import profile
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.manifests import manifest

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.kinds import PROFILES


def stored(name: str, **spec: Any) -> dict[str, Any]:
    body = manifest(name, **spec)
    body["metadata"] |= {"uid": name, "resourceVersion": "1", "generation": 1}
    return body


def test_a_profile_wakes_its_services_and_no_others() -> None:
    woken: list[tuple[str, str]] = []
    cache = Cache(woken.append)
    for body in (stored("a", profileRef={"name": "h100"}), stored("b"), stored("c", profileRef={"name": "l40"}), stored("h100")):
        cache.put(body)
    woken.clear()
    shared = profile(engine={"maxNumSeqs": 3})
    cache.put(shared)
    assert woken == [("default", "a")] and cache.profile("default", "h100") is not None
    cache.put(shared)
    assert woken == [("default", "a")], "the same version"
    newer = copy.deepcopy(shared)
    newer["metadata"]["resourceVersion"] = "2"
    cache.put(newer)
    elsewhere = copy.deepcopy(shared)
    elsewhere["metadata"] |= {"namespace": "other", "uid": "q"}
    cache.put(elsewhere)
    assert woken == [("default", "a")] * 2, "a profile is for its own namespace"
    assert cache.retain(PROFILES, {"q"}, 3) == 1 and cache.profile("default", "h100") is None
    assert woken == [("default", "a")] * 3 and cache.exists(("default", "h100")), "the service of that name stays"


def args(cluster: Cluster) -> list[str]:
    return list(cluster.get("deployments", "qwen-worker")["spec"]["template"]["spec"]["containers"][0]["args"])


def test_profiles_on_an_api_server(cluster: Cluster) -> None:
    server, namespace = cluster.server, cluster.namespace
    path = f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceprofiles"
    shared = {"apiVersion": "fairlead.dev/v1alpha1", "kind": "InferenceProfile", "metadata": {"name": "h100", "namespace": namespace}}
    cluster.create(profileRef={"name": "h100"})
    eventually(lambda: cluster.ready().get("reason") == "ProfileNotFound")
    assert f"InferenceProfile h100, which does not exist in namespace {namespace}" in cluster.ready()["message"]
    assert cluster.get("deployments", "qwen-worker") is None
    with pytest.raises(apiserver.Refused, match=r"spec\.replicas"):
        server.create(path, {**shared, "spec": {"replicas": 3}})
    with pytest.raises(apiserver.Refused, match=r"spec\.engine\.dtype"):
        server.create(path, {**shared, "spec": {"engine": {"dtype": "Int3"}}})
    made = server.create(path, {**shared, "spec": {"engine": {"maxNumSeqs": 63}, "access": {}}})
    assert made["spec"] == {"engine": {"maxNumSeqs": 63}, "access": {}}, "no defaults, and nothing is required"
    eventually(lambda: cluster.ready().get("reason") == "InvalidSpec")
    assert "InferenceProfile h100 and this service together: spec.access.keysSecretRef: is required" in cluster.ready()["message"]

    def edit(spec: dict[str, Any]) -> None:
        code, answer = server.request("PATCH", f"{path}/h100", {"spec": spec}, "application/merge-patch+json")
        assert code == 200, answer

    edit({"access": None})
    eventually(lambda: cluster.get("deployments", "qwen-worker"))
    assert "--max-num-seqs=63" in args(cluster)
    before = eventually(lambda: cluster.get("deployments", "qwen-router"))["spec"]["template"]
    edit({"engine": {"maxNumSeqs": 62}})
    eventually(lambda: "--max-num-seqs=62" in args(cluster))
    assert cluster.get("deployments", "qwen-router")["spec"]["template"] == before, "only what the field shapes is rolled out"
    assert len(cluster.get("controllerrevisions", "")["items"]) == 3, "two of the workers, one of the routers"
    cluster.patch("inferenceservices", "qwen", {"spec": {"engine": {"maxNumSeqs": 7}}})
    eventually(lambda: "--max-num-seqs=7" in args(cluster))
    server.request("DELETE", f"{path}/h100")
    eventually(lambda: cluster.ready().get("reason") == "ProfileNotFound")
    assert "--max-num-seqs=7" in args(cluster), "the running pods stay"
