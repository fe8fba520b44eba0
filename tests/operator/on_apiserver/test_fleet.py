"""New images of the operator on a real API server: admitted, rolled out, and shown by `kubectl fairlead outdated`."""

from typing import Any

from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator

from fairlead.kube.api import Kube
from fairlead.kube.outdated import find_outdated


def test_an_auto_service_takes_new_images_and_a_pinned_one_is_outdated(
    server: apiserver.ApiServer, namespace: str, router: StubRouter
) -> None:
    cluster = Cluster(server, namespace)

    def update() -> Any:
        return (cluster.get("inferenceservices", "qwen").get("status") or {}).get("imageUpdate") or {}

    def images() -> tuple[str, ...]:
        templates = (cluster.get("deployments", f"qwen-{component}")["spec"]["template"] for component in ("worker", "router"))
        return tuple(template["spec"]["containers"][0]["image"] for template in templates)

    def outdated() -> set[tuple[str, str]]:
        return {(one.component, one.reason) for one in find_outdated(Kube.connect(str(server.kubeconfig)).services(namespace))}

    with run_operator(server.kubeconfig, namespace, router.url):
        cluster.create()
        cluster.play_controllers()
        eventually(lambda: cluster.ready().get("status") == "True")
        eventually(lambda: update().get("phase") == "Current")
        assert outdated() == set()
    newer = {"worker_image": "worker:2", "router_image": "control:2", "rollout_observation_seconds": 0.0}
    with run_operator(server.kubeconfig, namespace, router.url, **newer):
        eventually(lambda: update().get("phase") == "Pinned")
        assert images() == ("worker:1", "control:1") and outdated() == {("worker", "Pinned"), ("router", "Pinned")}
        cluster.patch("inferenceservices", "qwen", {"spec": {"rollout": {"engineVersion": "Auto"}}})
        eventually(lambda: update().get("phase") == "RollingOut")
        eventually(lambda: images() == ("worker:2", "control:2"))
        assert (update()["previousWorkerImage"], update()["previousRouterImage"]) == ("worker:1", "control:1")
    with run_operator(server.kubeconfig, namespace, router.url, **newer):
        cluster.play_controllers()
        eventually(lambda: update().get("phase") == "Current")
        assert images() == ("worker:2", "control:2") and outdated() == set()
    events = server.get(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events")["items"]
    assert {"UpdatingImages", "ImagesUpdated"} <= {one["reason"] for one in events}
