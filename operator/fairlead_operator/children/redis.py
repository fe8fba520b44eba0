"""How workers and routers reach the index: variables and flags, and one Secret for each role, which the kubelet mounts as files.

Names and passwords of the Redis users are derived, so that no state of a service is stored or read.
"""

import hashlib
import hmac
from collections.abc import Mapping

from fairlead_index.redis.access_rules import USER_PREFIX, Role, user_name
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import pods, secrets
from fairlead_operator.objects import Object
from fairlead_operator.observed import ObservedRedis
from fairlead_operator.settings import Settings

MOUNT = "/etc/fairlead/redis"
ROLES: tuple[Role, ...] = ("worker", "router")


def flags(settings: Settings) -> dict[str, object]:
    """Return the router's flags, only those with a value other than the default."""
    if not settings.redis_url:
        return {}
    made: dict[str, object] = {"redis-url": settings.redis_url}
    return made | ({"redis-credentials": MOUNT} if settings.redis_credentials else {})


def variables(settings: Settings) -> dict[str, object]:
    """Return the worker's environment variables: the same settings as the router's flags."""
    return {f"FAIRLEAD_{flag.replace('-', '_').upper()}": value for flag, value in flags(settings).items()}


def objects(service: InferenceService, settings: Settings, seen: ObservedRedis | None) -> list[Object]:
    """Return one Secret for each role, so that a router never has a worker's credential. Without `seen`, existing Secrets stay."""
    if not (settings.redis_url and settings.redis_credentials) or seen is None:
        return []
    return [
        secrets.build_fixed(service, names.redis_secret(service, role), role, {**seen.files, **_login(service, seen, role)})
        for role in ROLES
    ]


def _login(service: InferenceService, seen: ObservedRedis, role: Role) -> Mapping[str, str]:
    """Return username and password, if Redis has any. Until it answers, each service keeps its kind of credentials (shared or its own)."""
    if seen.state == "None":
        return {}
    index = service.status.index
    if seen.state == "Shared" or (seen.state == "" and index is not None and index.credentials == "Shared"):
        return seen.login
    return {
        "username": user_name(role, names.index_namespace(service), prefix_of(seen.installation)),
        "password": password_of(seen.key, role, service.namespace, service.name, service.uid),
    }


def mounted(service: InferenceService, settings: Settings, role: str) -> list[pods.Mounted]:
    """Return the role's volume. It is optional: a pod starts and serves without the Secret, and uses it once it exists."""
    if not (settings.redis_url and settings.redis_credentials):
        return []
    return [pods.Mounted("redis", MOUNT, pods.secret_source(names.redis_secret(service, role), optional=True))]


def prefix_of(installation: str) -> str:
    """Return the prefix of the names of the installation's users."""
    return f"{USER_PREFIX}{installation}:"


def password_of(key: str, role: str, namespace: str, name: str, uid: str) -> str:
    """Return the password of one role of one service: 64 hexadecimal digits. A service that is deleted and created again gets another."""
    return hmac.new(key.encode(), f"redis/{role}/{namespace}/{name}/{uid}".encode(), hashlib.sha256).hexdigest()
