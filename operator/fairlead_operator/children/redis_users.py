"""Names and passwords of the Redis users of a service: derived, so that no state of a service is stored or read. Pure.

It does not import `cryptography`: `fairlead up` renders the same objects without the operator's own dependencies.
"""

import hashlib
import hmac

from fairlead_index.redis.access_rules import USER_PREFIX, Role

ROLES: tuple[Role, ...] = ("worker", "router")


def prefix_of(installation: str) -> str:
    """Return the prefix of the names of the installation's users."""
    return f"{USER_PREFIX}{installation}:"


def password_of(key: str, role: str, namespace: str, name: str, uid: str) -> str:
    """Return the password of one role of one service: 64 hexadecimal digits. A service that is deleted and created again gets another."""
    return hmac.new(key.encode(), f"redis/{role}/{namespace}/{name}/{uid}".encode(), hashlib.sha256).hexdigest()
