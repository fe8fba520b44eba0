"""The operator's Redis settings in workers and routers: flags, volumes, and a Secret for each role."""

import hmac
import json
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from tests.operator.support.manifests import SETTINGS, service

from fairlead_operator.config import OperatorConfig
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed, ObservedRedis
from fairlead_operator.settings import Settings

SECURED = replace(SETTINGS, redis_url="rediss://redis.data:6380", redis_credentials=True)
SEEN = ObservedRedis("PerService", installation="ab12", key="k" * 64, files={"ca.crt": "CA", "tls.crt": "CRT", "tls.key": "KEY"})
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def made(settings: Settings, seen: ObservedRedis | None = SEEN, status: Any = None, /, **routing: Any) -> list[dict[str, Any]]:
    return desired(service(routing=routing, status=status), Observed(redis=seen), settings, NOW).objects


def pods(settings: Settings, **routing: Any) -> dict[str, dict[str, Any]]:
    """By component: its pods."""
    deployments = [one for one in made(settings, **routing) if one["kind"] == "Deployment"]
    return {one["metadata"]["name"].rpartition("-")[2]: one["spec"]["template"]["spec"] for one in deployments}


def index_settings(container: dict[str, Any]) -> set[str]:
    """Return the flags of a router, and the variables of a worker as flags."""
    variables = {one["name"].removeprefix("FAIRLEAD_"): one.get("value") for one in container["env"] if one["name"].startswith("FAIRLEAD_")}
    return set(container["args"]) | {f"--{name.lower().replace('_', '-')}={value}" for name, value in variables.items()}


def credentials(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Secrets with logins. That of the routers alone, for stored responses, holds none."""
    return [one for one in objects if one["kind"] == "Secret" and "-responses-" not in one["metadata"]["name"]]


def given(seen: ObservedRedis | None, status: Any = None) -> dict[str, dict[str, str]]:
    """By Secret: what it holds."""
    secrets = credentials(made(SECURED, seen, status))
    return {one["metadata"]["name"]: {key: b64decode(value).decode() for key, value in one["data"].items()} for one in secrets}


def test_each_role_mounts_its_own_credentials_and_no_others() -> None:
    for role, spec in pods(SECURED).items():
        (container,) = spec["containers"]
        assert {"--redis-url=rediss://redis.data:6380", "--redis-credentials=/etc/fairlead/redis"} <= index_settings(container)
        assert {"name": "redis", "mountPath": "/etc/fairlead/redis", "readOnly": True} in container["volumeMounts"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "redis"]
        assert volume["secret"] == {"secretName": f"qwen-redis-{role}", "optional": True, "defaultMode": 0o440}
        assert f"qwen-redis-{'router' if role == 'worker' else 'worker'}" not in json.dumps(spec)


def test_the_secrets_come_before_the_pods_and_belong_to_the_service() -> None:
    objects = made(SECURED)
    kinds = [one["kind"] for one in objects]
    assert kinds.index("Deployment") > max(objects.index(one) for one in credentials(objects))
    for one in credentials(objects):
        assert one["metadata"]["ownerReferences"][0]["uid"] == "uid-1"
    assert set(given(SEEN)) == {"qwen-redis-worker", "qwen-redis-router"}


def test_passwords_are_derived_from_key_role_and_uid_alone() -> None:
    worker_, router_ = given(SEEN).values()
    assert worker_["username"] == "fairlead:ab12:worker:default/qwen" and router_["username"] == "fairlead:ab12:router:default/qwen"
    assert worker_["password"] == hmac.digest(b"k" * 64, b"redis/worker/default/qwen/uid-1", "sha256").hex()
    assert worker_["password"] != router_["password"] and worker_["ca.crt"] == "CA"
    assert given(replace(SEEN, key="n" * 64))["qwen-redis-worker"]["password"] != worker_["password"]


def test_a_shared_login_is_given_as_it_is_and_kept_while_redis_is_silent() -> None:
    shared = replace(SEEN, state="Shared", login={"username": "team", "password": "p"})
    status = {"index": {"state": "Available", "lastTransitionTime": "2026-01-01T00:00:00Z", "credentials": "Shared"}}
    assert (
        given(shared)["qwen-redis-worker"]["password"] == given(replace(shared, state=""), status)["qwen-redis-router"]["password"] == "p"
    )
    assert given(replace(shared, state=""))["qwen-redis-worker"]["username"].startswith("fairlead:")
    assert given(None) == {}, "what exists is not touched before the operator has looked"


def test_without_credentials_there_is_nothing_of_them() -> None:
    for settings in (SETTINGS, replace(SECURED, redis_url="")):
        assert not credentials(made(settings))
        for spec in pods(settings).values():
            assert "/etc/fairlead/redis" not in json.dumps(spec)
            flags = {argument for argument in index_settings(spec["containers"][0]) if argument.startswith("--redis")}
            assert flags == ({f"--redis-url={settings.redis_url}"} if settings.redis_url else set())


def test_objects_are_rendered_without_the_operators_own_dependencies() -> None:
    """The worker's image renders them for `fairlead up`, and has neither."""
    program = "import sys; sys.modules.update(cryptography=None, kopf=None); import fairlead_operator.desired"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_credentials_change_no_revision() -> None:
    """Or each rotation, and the first start of this release, would restart every pod."""
    worker_, router_ = (
        {body["metadata"]["name"] for body in made(settings) if body["kind"] == "ControllerRevision"} for settings in (SECURED, SETTINGS)
    )
    assert worker_ == router_


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"redis_url": "redis://:secret@r"}, "--redis-credentials"),
        ({"redis_url": "http://r"}, "redis url"),
        ({"redis_url": "redis://r", "redis_bundled": True}, "--credentials-secret"),
    ],
)
def test_invalid_redis_flags_are_refused_by_name(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        OperatorConfig(worker_image="w", router_image="r", **wrong)


def test_a_redis_without_passwords_gives_pods_its_certificates_alone() -> None:
    seen = replace(SEEN, state="None")
    assert given(seen)["qwen-redis-router"] == {"ca.crt": "CA", "tls.crt": "CRT", "tls.key": "KEY"}
