"""A full list finds the changes that the watches missed."""

from tests.operator.support import apiserver
from tests.operator.support.manifests import manifest

from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import Cluster
from fairlead_operator.kube.kinds import SERVICES
from fairlead_operator.kube.resync import STALE, Resync


async def test_a_missed_deletion_and_a_missed_creation_are_found(server: apiserver.ApiServer, namespace: str) -> None:
    path = f"/apis/fairlead.dev/v1alpha1/namespaces/{namespace}/inferenceservices"
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    labels = {"app.kubernetes.io/managed-by": "fairlead", "app.kubernetes.io/instance": "qwen"}
    server.create(path, manifest("qwen", namespace))
    server.create(accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "qwen", "labels": labels}})
    server.create(accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "other"}})
    woken: list[tuple[str, str]] = []
    cache = Cache(woken.append)
    async with Cluster.connect(str(server.kubeconfig)) as cluster:
        resync = Resync(cluster, cache, (namespace,))
        assert await resync.resync() == 0
        owner = (namespace, "qwen")
        assert cache.service(owner) is not None and set(cache.children(owner)) == {("ServiceAccount", "qwen")}
        for gone in (f"{path}/qwen", f"{accounts}/qwen"):
            assert server.request("DELETE", gone)[0] == 200
        woken.clear()
        assert await resync.resync() == 2
        assert cache.service(owner) is None and not cache.children(owner) and set(woken) == {owner}
        assert await cluster.get(SERVICES, namespace, "qwen") is None and resync.seconds_since_resync < STALE
