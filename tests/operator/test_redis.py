"""What the operator's Redis settings make of workers and routers: paths and a volume, and never a secret."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import ValidationError
from tests.operator.manifests import SETTINGS, service

from fairlead_operator.children import router, worker
from fairlead_operator.config import OperatorConfig
from fairlead_operator.desired import desired
from fairlead_operator.observed import Observed
from fairlead_operator.settings import Settings

SECURED = replace(
    SETTINGS,
    redis_url="rediss://redis.data:6380",
    redis_username="fairlead",
    redis_secret="index-redis",
    redis_secret_password_key="password",
    redis_secret_ca_key="ca.crt",
    redis_secret_cert_key="tls.crt",
    redis_secret_key_key="tls.key",
)
FILES = [
    "--redis-username=fairlead",
    "--redis-password-file=/etc/fairlead/redis/password",
    "--redis-ca-file=/etc/fairlead/redis/ca.crt",
    "--redis-cert-file=/etc/fairlead/redis/tls.crt",
    "--redis-key-file=/etc/fairlead/redis/tls.key",
]


def pods(settings: Settings, **routing: Any) -> list[dict[str, Any]]:
    made = desired(service(routing=routing), Observed(), settings, datetime(2026, 1, 1, tzinfo=UTC)).objects
    return [one["spec"]["template"]["spec"] for one in made if one["kind"] == "Deployment"]


def test_workers_and_routers_get_paths_and_an_optional_volume() -> None:
    specs = pods(SECURED)
    assert len(specs) == 2
    for spec in specs:
        (container,) = spec["containers"]
        assert {"--redis-url=rediss://redis.data:6380", *FILES} <= set(container["args"])
        assert {"name": "redis", "mountPath": "/etc/fairlead/redis", "readOnly": True} in container["volumeMounts"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "redis"]
        assert volume["secret"] == {"secretName": "index-redis", "optional": True, "defaultMode": 0o440}


def test_without_a_secret_there_is_nothing_of_it_and_older_images_are_given_no_new_flag() -> None:
    for settings in (SETTINGS, replace(SECURED, redis_url="")):
        for spec in pods(settings):
            assert "/etc/fairlead/redis" not in json.dumps(spec) and "index-groups" not in json.dumps(spec)
            flags = [argument for argument in spec["containers"][0]["args"] if argument.startswith("--redis")]
            assert flags == ([f"--redis-url={settings.redis_url}"] if settings.redis_url else [])


def test_groups_reach_both_sides_and_roll_both() -> None:
    assert all("--index-groups=4" in spec["containers"][0]["args"] for spec in pods(SETTINGS, indexGroups=4))
    one, four = service(), service(routing={"indexGroups": 4})
    assert router.revision(one) != router.revision(four) and worker.revision(one) != worker.revision(four)
    assert worker.revision(service(routing={"indexGroups": 1})) == worker.revision(one)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"redis_url": "redis://:secret@r"}, "--redis-secret"),
        ({"redis_url": "http://r"}, "redis url"),
        ({"redis_url": "redis://r", "redis_secret": "s", "redis_secret_ca_key": "ca"}, "rediss"),
        ({"redis_url": "rediss://r", "redis_secret_ca_key": "ca"}, "--redis-secret"),
        ({"redis_url": "rediss://r", "redis_secret": "s", "redis_secret_cert_key": "c"}, "go together"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        OperatorConfig(worker_image="w", router_image="r", **wrong)
