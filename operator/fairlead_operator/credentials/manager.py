"""Maintains the operator's own Secret and, on every Redis node, one user per service and role. Runs while this process leads."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.access_rules import CannotManageUsers
from fairlead_index.redis.scripts import REDIS_ERRORS
from fairlead_operator.children.redis import prefix_of
from fairlead_operator.config import OperatorConfig
from fairlead_operator.credentials.administrator import Administrator, LoginRefused
from fairlead_operator.credentials.own_secret import OwnSecret
from fairlead_operator.credentials.secret_data import SecretData
from fairlead_operator.credentials.users import Identity, RedisUsers, desired_users
from fairlead_operator.observed import ObservedRedis

log = logging.getLogger(__name__)
PERIOD = 3.0  # seconds between two reconciles: a restarted Redis has its users again after this
REFUSED_RETRY = 60.0  # seconds until a Redis that refused to create users is tried again
NO_PASSWORD = "The operator has no password of Redis (chart value redis.existingSecret)"


@dataclass(frozen=True)
class Accepted:
    """Credentials that all nodes accept, and since when, as far as this process knows (time.monotonic)."""

    credentials: frozenset[str] = frozenset()
    since: float = 0.0


class CredentialsManager:
    """`seen`: the credentials for services. `reconciled` is set after the first attempt. Calls `on_change()` when `seen` changes."""

    def __init__(
        self, config: OperatorConfig, secret: OwnSecret, services: Callable[[], Iterable[Identity]], on_change: Callable[[], None]
    ) -> None:
        """`services`: namespace, name and uid of the InferenceServices that exist."""
        self._config, self._secret, self._services, self._on_change = config, secret, services, on_change
        self.seen: ObservedRedis | None = None
        self.reconciled = asyncio.Event()
        self._administrator, self._users = Administrator(config), RedisUsers()
        self._accepted = Accepted()
        self._shared_until = 0.0  # when to try again to create users
        self._problem = ""

    async def run(self) -> None:
        """Reconcile forever. A new problem is logged, and every one is retried."""
        try:
            while True:
                try:
                    await self.reconcile()
                    self._log("")
                except Exception as error:  # any error: services must not lose their operator because of it
                    self._log(f"{type(error).__name__}: {error}")
                self.reconciled.set()
                await asyncio.sleep(PERIOD)
        finally:
            await self._administrator.close()

    async def reconcile(self) -> None:
        """Bring the Secret and the users one step nearer to the wanted state. Raises errors of Redis and of the API server."""
        config = self._config
        if not config.settings.redis_credentials:
            self._publish(ObservedRedis("None", NO_PASSWORD) if config.redis_url else ObservedRedis(""))
            return
        given = self._administrator.read_given()
        issues = config.redis_bundled and config.redis_url.startswith("rediss") and "ca.crt" not in given
        # The grace starts when Redis accepts the new passwords: only then pods get them, and Redis may have been down since the request.
        settled = self._accepted.credentials if time.monotonic() - self._accepted.since >= config.rotation_grace else frozenset[str]()
        host = RedisAccess(config.redis_url).location.nodes[0][0] if issues else ""
        secret = await self._secret.ensure(settled=settled, host=host, now=datetime.now(UTC))
        if issues and secret.certificates is not None:
            given["ca.crt"] = secret.certificates.authority
        seen = self._credentials_for_services(secret, given)
        if not config.redis_bundled and "password" not in given:
            self._accept(secret)  # there is no server that must accept them
            self._publish(replace(seen, state="None", reason=NO_PASSWORD))
            return
        if time.monotonic() < self._shared_until and self.seen is not None:
            self._accept(secret)  # shared credentials have no users
            self._publish(replace(seen, state="Shared", reason=self.seen.reason))
            return
        try:
            await self._sync_users(secret, given)
        except CannotManageUsers as refusal:
            if config.redis_bundled:  # here the only login is the administrator's, so sharing is impossible
                raise
            self._shared_until = time.monotonic() + REFUSED_RETRY
            self._accept(secret)
            self._publish(replace(seen, state="Shared", reason=f"The operator cannot create users: {refusal}"))
        except (LoginRefused, *REDIS_ERRORS):
            if self.seen is None:  # what was published before stays
                self._publish(seen)
            raise
        else:
            self._accept(secret)
            self._publish(replace(self._credentials_for_services(secret, given), state="PerService"))

    def _accept(self, secret: SecretData) -> None:
        if secret.credentials != self._accepted.credentials:
            self._accepted = Accepted(secret.credentials, time.monotonic())

    async def _sync_users(self, secret: SecretData, given: Mapping[str, str]) -> None:
        """Make every node accept the passwords of `secret`, and no other passwords of ours."""
        passwords = self._administrator.list_passwords(given, secret)
        client = await self._administrator.connect(given, passwords)
        try:
            if self._config.redis_bundled:
                await self._administrator.maintain(client, passwords)
            written = await self._users.reconcile(client, desired_users(secret, self._services()), prefix_of(secret.installation))
            if written:
                log.info("wrote %d redis users", written)
        except REDIS_ERRORS:
            await self._administrator.disconnect()
            raise

    def _credentials_for_services(self, secret: SecretData, given: Mapping[str, str]) -> ObservedRedis:
        """Return the credentials for services, while the kind of login is unknown."""
        login = {}
        if "password" in given and not self._config.redis_bundled:  # a bundled Redis has an administrator that no service may be
            username = given.get("username", self._administrator.given_username)
            login = {"username": username.strip("\r\n"), "password": given["password"].strip("\r\n")}
        files = {name: text for name, text in given.items() if name not in ("username", "password")}
        # Pods get no password that some node does not accept yet.
        key = secret.previous_key if secret.rotating and secret.key not in self._accepted.credentials else secret.key
        return ObservedRedis("", "", secret.installation, key, files, login)

    def _publish(self, seen: ObservedRedis) -> None:
        if seen != self.seen:
            self.seen = seen
            self._on_change()

    def _log(self, problem: str) -> None:
        if problem != self._problem:
            log.log(logging.WARNING if problem else logging.INFO, "redis credentials: %s", problem or "no problem")
        self._problem = problem
