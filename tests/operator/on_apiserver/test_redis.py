"""The whole operator with a real API server and a real Redis: Secrets, users, a requested rotation, a restarted Redis."""

from base64 import b64decode
from collections.abc import Iterator

import pytest
from tests.operator.credentials.test_redis_credentials import SERVERS, accepts, secured
from tests.operator.support import apiserver
from tests.operator.support.cluster import Cluster, eventually
from tests.operator.support.running_operator import StubRouter, run_operator
from tests.servers.redis_server import RedisServer, free_port

from fairlead_operator.credentials import manager
from fairlead_operator.credentials.secret_data import ROTATE

DEPLOYMENT = {
    "replicas": 0,
    "selector": {"matchLabels": {"a": "b"}},
    "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "operator", "image": "control:1"}]}},
}


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    made = RedisServer(SERVERS[0], port=free_port())
    yield made
    made.stop()


def test_secrets_users_rotation_and_a_restarted_redis(
    server: apiserver.ApiServer, namespace: str, router: StubRouter, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "PERIOD", 0.1)
    cluster = Cluster(server, namespace)
    body = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "operator", "namespace": namespace}, "spec": DEPLOYMENT}
    own_deployment = server.create(cluster.path("deployments"), body)
    cluster.create()

    def held(name: str) -> dict[str, str]:
        found = cluster.get("secrets", name)
        return {key: b64decode(value).decode() for key, value in found["data"].items()} if found else {}

    flags = {"redis_url": f"redis://127.0.0.1:{redis_server.port}", "redis_bundled": True}
    with run_operator(server.kubeconfig, namespace, router.url, credentials_secret="own", deployment="operator", rotation_grace=1, **flags):
        given = {role: eventually(lambda role=role: held(f"qwen-redis-{role}")) for role in ("worker", "router")}
        (owner,) = cluster.get("secrets", "own")["metadata"]["ownerReferences"]
        assert owner["uid"] == own_deployment["metadata"]["uid"]
        secured(redis_server, held("own")["password"])
        for each in given.values():
            eventually(lambda each=each: accepts(redis_server, each))

        cluster.patch("secrets", "own", {"metadata": {"annotations": {ROTATE: "now"}}})
        for role, before in given.items():
            eventually(lambda role=role, before=before: held(f"qwen-redis-{role}")["password"] != before["password"])
            assert accepts(redis_server, held(f"qwen-redis-{role}")), "what a pod is given works from the first moment"
        eventually(lambda: not held("own")["previous-key"])
        assert ROTATE not in (cluster.get("secrets", "own")["metadata"].get("annotations") or {})
        eventually(lambda: not accepts(redis_server, given["worker"]))

        redis_server.kill()
        secured(redis_server, held("own")["password"])
        eventually(lambda: accepts(redis_server, held("qwen-redis-worker")))


def test_pods_of_a_release_without_credentials_stay_until_they_are_replaced(
    server: apiserver.ApiServer, namespace: str, router: StubRouter
) -> None:
    """As docs/operate/upgrade.md has it for an upgrade: the routers by their ControllerRevision."""
    cluster = Cluster(server, namespace)

    def args() -> list[str]:
        found = cluster.get("deployments", "qwen-router")
        return found["spec"]["template"]["spec"]["containers"][0]["args"] if found else []

    cluster.create()
    with run_operator(server.kubeconfig, namespace, router.url):
        before = eventually(args)
    flags = {"redis_url": f"redis://127.0.0.1:{free_port()}", "redis_bundled": True}
    with run_operator(server.kubeconfig, namespace, router.url, credentials_secret="own", **flags):
        eventually(lambda: cluster.get("secrets", "qwen-redis-router"))
        assert args() == before
        selector = "app.kubernetes.io/instance=qwen,app.kubernetes.io/component=router"
        done = server.kubectl("delete", "controllerrevisions", "-n", namespace, "-l", selector)
        assert done.returncode == 0, done.stderr
        eventually(lambda: "--redis-credentials=/etc/fairlead/redis" in args())
