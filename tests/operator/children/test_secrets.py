"""Secrets are created or applied without being read; a group's Secret is random, and in no pod's template."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.simulated.api import Api
from tests.operator.simulated.operator import finished
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import secrets, worker
from fairlead_operator.desired import desired
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed
from fairlead_operator.reconcile import secret_writer
from fairlead_operator.reconcile.applier import Applier
from fairlead_operator.reconcile.secret_writer import SecretWriter
from fairlead_operator.revisions import worker_revision

NOW = datetime(2026, 1, 1, tzinfo=UTC)
ENGINE = {"tensorParallel": 16, "nodes": 2}


class Unreadable(Api):
    """As the chart's rules: no reads of Secrets; `refusing` is the answer to every write."""

    refusing: ApiError | None = None

    async def get(self, kind: Any, namespace: str, name: str) -> Any:
        assert kind.kind != "Secret", "a Secret was read"
        return await super().get(kind, namespace, name)

    async def create(self, kind: Any, body: Any) -> Any:
        if self.refusing is not None:
            raise self.refusing
        return await super().create(kind, body)


def applier(api: Api) -> tuple[Applier, Cache]:
    cache = Cache(lambda owner: None)
    return Applier(api, cache, "default", "qwen", "uid-1"), cache  # type: ignore[arg-type]


def of_group(one: InferenceService) -> tuple[Object, Object]:
    """The Secret, and the templates of leader and follower."""
    made = {body["kind"]: body for body in worker.objects(one, SETTINGS)}
    return made["Secret"], made["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]


def test_the_secret_of_a_group_is_random_and_no_literal() -> None:
    one = service(engine=ENGINE)
    secret, pods = of_group(one)
    (owner,) = secret["metadata"]["ownerReferences"]
    assert owner["uid"] == one.uid and secret["immutable"]
    for template in ("leaderTemplate", "workerTemplate"):
        (container,) = pods[template]["spec"]["containers"]
        env = {each["name"]: each for each in container["env"]}
        assert env["NODES_SECRET"]["valueFrom"] == {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "secret"}}
        assert env["FAIRLEAD_NODES_SECRET"]["value"] == f"$(NODES_SECRET)-{worker_revision(one)}"
        assert list(env).index("NODES_SECRET") < list(env).index("FAIRLEAD_NODES_SECRET"), "the kubelet expands what stands before"
    values = []
    for _ in range(2):
        api = Unreadable()
        assert not finished(applier(api)[0].converge([secret]))
        (held,) = api.of("Secret")
        values.append(held["data"]["secret"])
    assert values[0] != values[1] and len(values[0]) > 40
    assert "Secret" not in {body["kind"] for body in worker.objects(service(), SETTINGS)}


def test_a_generated_secret_is_created_once(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Unreadable()
    secret, _ = of_group(service(engine=ENGINE))
    first, cache = applier(api)
    for _ in range(3):
        assert not finished(first.converge([secret]))
    assert [how for _, how, _ in api.writes] == ["create"], "asked once while nothing changes"
    (held,) = api.of("Secret")
    assert not cache.keys(("default", "qwen")), "no value is kept in memory"
    assert not finished(applier(api)[0].converge([secret])), "an operator that has just started finds it there"
    assert api.of("Secret") == [held]
    monkeypatch.setattr(secret_writer, "REWRITE_PERIOD", 0.0)
    api.remove(("Secret", names.random_secret(service(engine=ENGINE), "nodes")))
    finished(first.converge([secret]))
    assert api.of("Secret")[0]["data"] != held["data"], "one that was deleted comes back"


def test_given_data_is_applied_when_it_changes_and_repeated_in_time() -> None:
    api, now = Unreadable(), [0.0]
    writer = SecretWriter(api, lambda: now[0])  # type: ignore[arg-type]

    def write(password: str) -> int:
        finished(writer.write(secrets.build_fixed(service(), "qwen-redis", names.WORKER, {"password": password})))
        return len(api.writes)

    assert [write("one"), write("one"), write("two")] == [1, 1, 2]
    assert api.of("Secret")[0]["data"] == {"password": "dHdv"}
    now[0] = secret_writer.REWRITE_PERIOD
    assert write("two") == 3
    assert "annotations" not in json.dumps(api.of("Secret")[0]), "no digest of what it holds"


@pytest.mark.parametrize(("code", "permanent"), [(403, True), (500, False)])
def test_a_permanent_refusal_is_reported_and_another_is_raised(code: int, permanent: bool) -> None:
    api = Unreadable()
    api.refusing = ApiError(code, "secrets is forbidden")
    secret, _ = of_group(service(engine=ENGINE))
    converged = applier(api)[0].converge([secret])
    if permanent:
        assert finished(converged) == {f"Secret/{secret['metadata']['name']}": "secrets is forbidden"}
    else:
        with pytest.raises(ApiError):
            finished(converged)


def test_only_routers_mount_the_secret_of_stored_responses() -> None:
    """It comes before them, is random, and the operator keeps no copy; neither workers nor the batch server can derive a key."""
    made = desired(service(batch={"storageURI": "pvc://batches/chat"}), Observed(), SETTINGS, NOW).objects
    (secret,) = [one for one in made if one["kind"] == "Secret" and "-responses-" in one["metadata"]["name"]]
    name = secret["metadata"]["name"]
    assert secret["immutable"] and secret["data"] == {"secret": secrets.GENERATED}
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment"}
    assert [each for each, spec in pods.items() if name in json.dumps(spec)] == ["qwen-router"]
    (container,) = pods["qwen-router"]["containers"]
    (file,) = [one["value"] for one in container["env"] if one["name"] == "FAIRLEAD_RESPONSES_SECRET_FILE"]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "responses"]
    assert file == f"{mount['mountPath']}/secret" and mount["readOnly"] and "subPath" not in mount
    order = [(one["kind"], one["metadata"]["name"]) for one in made]
    assert order.index(("Secret", name)) < order.index(("Deployment", "qwen-router"))
    alone = desired(service(), Observed(), replace(SETTINGS, redis_url=""), NOW).objects
    assert "responses" not in json.dumps(alone), "without Redis nothing is stored"


def test_an_operator_that_has_just_started_does_not_write_a_secret_that_a_child_mounts() -> None:
    """With a thousand services, that would be a thousand writes. A deleted one is created at the next rewrite."""
    api = Unreadable()
    secret, _ = of_group(service(engine=ENGINE))
    mounting = next(body for body in worker.objects(service(engine=ENGINE), SETTINGS) if body["kind"] == "LeaderWorkerSet")
    restarted, cache = applier(api)
    with cache.read() as read:
        read.put({**mounting, "metadata": {**mounting["metadata"], "uid": "2", "resourceVersion": "7"}})
    finished(restarted.converge([secret, mounting]))
    assert not [how for _, how, _ in api.writes if how == "create"]
    restarted._secrets._clock = lambda: 1e9
    finished(restarted.converge([secret, mounting]))
    assert len(api.of("Secret")) == 1
