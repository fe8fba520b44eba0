"""Names and passwords of the Redis users of a service: derived, so that nothing about a service has to be kept or read. Pure.

Imports no cryptography: `fairlead up` renders the same objects where the operator's own dependencies are not installed.
"""

import hashlib
import hmac

from fairlead_index.redis.access_rules import USER_PREFIX, Role

ROLES: tuple[Role, ...] = ("worker", "router")


def prefix_of(installation: str) -> str:
    """Return what names of the installation's users begin with."""
    return f"{USER_PREFIX}{installation}:"


def password_of(key: str, role: str, namespace: str, name: str, uid: str) -> str:
    """Return the password of one role of one service: 64 hexadecimal digits. A service made again under its name gets another."""
    return hmac.new(key.encode(), f"redis/{role}/{namespace}/{name}/{uid}".encode(), hashlib.sha256).hexdigest()
