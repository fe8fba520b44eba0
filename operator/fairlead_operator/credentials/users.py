"""The Redis users of all services: one per role, created on every node, and deleted after their service."""

import time
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field

from fairlead_index.redis.access_rules import Role, delete_user, ensure_user, list_users, load_functions, user_name
from fairlead_index.redis.client import RedisClient
from fairlead_operator.children.redis import ROLES, password_of, prefix_of
from fairlead_operator.credentials.administrator import hashes_of
from fairlead_operator.credentials.secret_data import SecretData

Identity = tuple[str, str, str]  # namespace, name and uid of a service
REWRITE_PERIOD = 300.0  # seconds until every user is written again: a server may have restarted with older rules from its own file
DELETE_AFTER = 60.0  # seconds that a user must be unwanted before it is deleted: after a start not all services are known yet


@dataclass(frozen=True)
class User:
    """One Redis user, which accepts all of `passwords`."""

    role: Role
    namespace: str  # of the index
    prefix: str
    passwords: tuple[str, ...] = field(repr=False)

    @property
    def name(self) -> str:
        return user_name(self.role, self.namespace, self.prefix)


def desired_users(contents: SecretData, services: Iterable[Identity]) -> list[User]:
    """Return the users of `services`."""
    prefix, keys = prefix_of(contents.installation), [key for key in (contents.key, contents.previous_key) if key]
    return [
        User(role, f"{namespace}/{name}", prefix, tuple(password_of(key, role, namespace, name, uid) for key in keys))
        for namespace, name, uid in services
        for role in ROLES
    ]


class RedisUsers:
    """Remembers what was written to Redis. Without changes it costs one `ACL USERS` and one `FUNCTION LIST` per node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._written: dict[str, User] = {}
        self._all_written_at = clock()
        self._unwanted: dict[str, float] = {}  # name → since when

    async def reconcile(self, client: RedisClient, wanted: Sequence[User], prefix: str) -> int:
        """Create and change users until every node has `wanted`; return how many were written. Raises CannotManageUsers."""
        if self._clock() - self._all_written_at >= REWRITE_PERIOD:
            self._written, self._all_written_at = {}, self._clock()
        await load_functions(client)  # before the users, so that a service that connects finds them
        nodes = await list_users(client, prefix)
        everywhere, names = set.intersection(*nodes), {user.name: user for user in wanted}
        changed = [user for name, user in names.items() if name not in everywhere or self._written.get(name) != user]
        for user in changed:
            await ensure_user(client, user.role, user.namespace, hashes_of(user.passwords), prefix)
            self._written[user.name] = user
        for name in self._find_expired(set.union(*nodes) - names.keys()):
            await delete_user(client, name)
        self._written = {name: user for name, user in self._written.items() if name in names}
        return len(changed)

    def _find_expired(self, unwanted: Set[str]) -> list[str]:
        now = self._clock()
        self._unwanted = {name: self._unwanted.get(name, now) for name in unwanted}
        return [name for name, since in self._unwanted.items() if now - since >= DELETE_AFTER]
