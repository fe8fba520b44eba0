"""How workers and routers reach the index: flags, and a Secret that the kubelet mounts. The operator reads no Secret, in no namespace."""

from fairlead_operator.api import InferenceService
from fairlead_operator.children import Object
from fairlead_operator.revisions import said
from fairlead_operator.settings import Settings

MOUNT = "/etc/fairlead/redis"


def flags(service: InferenceService, settings: Settings) -> dict[str, object]:
    """Those that say something: images of older releases know `redis-url` alone."""
    if not settings.redis_url:
        return {}
    keys = {
        "redis-password-file": settings.redis_secret_password_key,
        "redis-ca-file": settings.redis_secret_ca_key,
        "redis-cert-file": settings.redis_secret_cert_key,
        "redis-key-file": settings.redis_secret_key_key,
    }
    made: dict[str, object] = {"redis-url": settings.redis_url}
    if settings.redis_username:
        made["redis-username"] = settings.redis_username
    if settings.redis_secret:
        made |= {flag: f"{MOUNT}/{key}" for flag, key in keys.items() if key}
    if service.spec.routing.index_groups > 1:
        made["index-groups"] = service.spec.routing.index_groups
    return made


def volumes(settings: Settings) -> list[Object]:
    """Of the service's own namespace, and optional: without it pods start and serve, steered by load, and use it as soon as it is there."""
    if not (settings.redis_url and settings.redis_secret):
        return []
    return [{"name": "redis", "secret": {"secretName": settings.redis_secret, "optional": True, "defaultMode": 0o440}}]


def mounts(settings: Settings) -> list[Object]:
    return [{"name": "redis", "mountPath": MOUNT, "readOnly": True}] if volumes(settings) else []


def shaping(service: InferenceService) -> dict[str, object]:
    """What the spec says about the index: both sides of it must be of one mind, so both are rolled when it changes."""
    return said(service.spec.routing, "index_groups")
