"""Maintains the operator's own Secret and, on every Redis node, one user per service and role. Runs while this process leads."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fairlead_index.redis.access import RedisAccess
from fairlead_index.redis.access_rules import CannotManageUsers
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.scripts import REDIS_ERRORS
from fairlead_operator.children.redis_users import prefix_of
from fairlead_operator.config import OperatorConfig
from fairlead_operator.credentials.administrator import Login, LoginRefused, log_in, reload_certificate, set_own_passwords
from fairlead_operator.credentials.own_secret import OwnSecret
from fairlead_operator.credentials.secret_data import SecretData
from fairlead_operator.credentials.users import Identity, RedisUsers, desired_users
from fairlead_operator.observed import ObservedRedis

log = logging.getLogger(__name__)
PERIOD = 3.0  # seconds between two reconciles: a restarted Redis has its users again after this
REFUSED_RETRY = 60.0  # seconds until a Redis that refused to create users is tried again
RELOAD_PERIOD = 60.0  # seconds between two reloads of the server's certificate: no event shows when the kubelet has renewed the file
NO_PASSWORD = "The operator has no password of Redis (chart value redis.existingSecret)"


class CredentialsManager:
    """`seen`: the credentials for services. `reconciled` is set after the first attempt. Calls `on_change()` when `seen` changes."""

    def __init__(
        self, config: OperatorConfig, secret: OwnSecret, services: Callable[[], Iterable[Identity]], on_change: Callable[[], None]
    ) -> None:
        """`services`: namespace, name and uid of the InferenceServices that exist."""
        self._config, self._secret, self._services, self._on_change = config, secret, services, on_change
        self.seen: ObservedRedis | None = None
        self.reconciled = asyncio.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="fairlead-redis-")
        self._administrator: tuple[Login, RedisClient] | None = None
        self._users = RedisUsers()
        self._accepted: frozenset[str] = frozenset()  # credentials that all nodes accept
        self._accepted_at = 0.0  # since when, as far as this process knows
        self._mounted_passwords: dict[str, float] = {}  # recent passwords of the mounted file → until when Redis accepts them
        self._shared, self._shared_until = "", 0.0  # why no users can be created, and when to try again
        self._reload_at = 0.0
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
            await self._disconnect()
            self._folder.cleanup()

    async def reconcile(self) -> None:
        """Bring the Secret and the users one step nearer to the wanted state. Raises errors of Redis and of the API server."""
        config = self._config
        if not config.redis_files:
            self._publish(ObservedRedis("None", NO_PASSWORD) if config.redis_url else ObservedRedis(""))
            return
        host = RedisAccess(config.redis_url).location.nodes[0][0]
        certificate_host = host if config.redis_bundled and config.redis_url.startswith("rediss") and not config.redis_ca_file else ""
        # The grace starts when Redis accepts the new passwords: only then pods get them, and Redis may have been down since the request.
        settled = self._accepted if time.monotonic() - self._accepted_at >= config.rotation_grace else frozenset[str]()
        secret = await self._secret.ensure(settled=settled, host=certificate_host, now=datetime.now(UTC))
        seen = self._credentials_for_services(secret)
        if "password" not in config.redis_files:
            self._accept(secret)  # there is no server that must accept them
            self._publish(replace(seen, state="None", reason=NO_PASSWORD))
            return
        if time.monotonic() < self._shared_until:
            self._publish(self._shared_credentials(seen, secret))
            return
        try:
            await self._sync_users(secret)
        except CannotManageUsers as refusal:
            if config.redis_bundled:  # here the only login is the administrator's, so sharing is impossible
                raise
            self._shared, self._shared_until = f"The operator cannot create users: {refusal}", time.monotonic() + REFUSED_RETRY
            self._publish(self._shared_credentials(seen, secret))
        except (LoginRefused, *REDIS_ERRORS):
            if self.seen is None:  # what was published before stays
                self._publish(seen)
            raise
        else:
            self._accept(secret)
            self._publish(replace(self._credentials_for_services(secret), state="PerService"))

    def _accept(self, secret: SecretData) -> None:
        if secret.credentials != self._accepted:
            self._accepted, self._accepted_at = secret.credentials, time.monotonic()

    async def _sync_users(self, secret: SecretData) -> None:
        """Make every node accept the passwords of `secret`, and no other passwords of ours."""
        passwords = self._passwords(secret)
        client = await self._connect(passwords)
        try:
            if self._config.redis_bundled:
                await set_own_passwords(client, self._config.redis_username, passwords)
            wanted = desired_users(secret, self._services())
            written = await self._users.reconcile(client, wanted, prefix_of(secret.installation))
            if written:
                log.info("wrote %d redis users", written)
            if self._config.redis_bundled and self._config.redis_url.startswith("rediss") and time.monotonic() >= self._reload_at:
                await reload_certificate(client)
                self._reload_at = time.monotonic() + RELOAD_PERIOD
        except REDIS_ERRORS:
            await self._disconnect()
            raise

    def _passwords(self, secret: SecretData) -> tuple[str, ...]:
        """Return the administrator's passwords, the current one first."""
        if not self._config.redis_password_file:
            return tuple(password for password in (secret.password, secret.previous_password) if password)
        now, present = time.monotonic(), _read(self._config.redis_password_file).strip("\r\n")
        self._mounted_passwords = {password: until for password, until in self._mounted_passwords.items() if until > now}
        self._mounted_passwords[present] = now + self._config.rotation_grace
        return present, *(password for password in self._mounted_passwords if password != present)

    async def _connect(self, passwords: tuple[str, ...]) -> RedisClient:
        config = self._config
        authority = config.redis_ca_file or (f"{self._folder.name}/ca.crt" if "ca.crt" in config.redis_files else "")
        access = RedisAccess(
            config.redis_url,
            config.redis_username,
            ca_file=authority,
            cert_file=config.redis_cert_file,
            key_file=config.redis_key_file,
            sentinel_username_file=config.redis_sentinel_username_file,
            sentinel_password_file=config.redis_sentinel_password_file,
        )
        login = Login(access, passwords)
        if self._administrator is None or self._administrator[0] != login:
            await self._disconnect()
            self._administrator = login, await log_in(login, Path(self._folder.name))
        return self._administrator[1]

    async def _disconnect(self) -> None:
        if self._administrator is not None:
            await self._administrator[1].close()
            self._administrator = None

    def _credentials_for_services(self, secret: SecretData) -> ObservedRedis:
        """Return the credentials for services, while the kind of login is unknown."""
        config = self._config
        if "ca.crt" in config.redis_files and not config.redis_ca_file and secret.certificates is not None:
            Path(self._folder.name, "ca.crt").write_text(secret.certificates.authority, encoding="utf-8")
        paths = {"ca.crt": config.redis_ca_file or f"{self._folder.name}/ca.crt"}
        paths |= {"tls.crt": config.redis_cert_file, "tls.key": config.redis_key_file}
        paths |= {"sentinel-username": config.redis_sentinel_username_file, "sentinel-password": config.redis_sentinel_password_file}
        files = {file: _read(path) for file, path in paths.items() if file in config.redis_files}
        # Pods get no password that some node does not accept yet.
        key = secret.previous_key if secret.rotating and secret.key not in self._accepted else secret.key
        login = {}
        if config.redis_password_file and not config.redis_bundled:  # a bundled Redis has an administrator that no service may be
            login = {"username": config.redis_username, "password": _read(config.redis_password_file).strip("\r\n")}
        return ObservedRedis("", "", secret.installation, key, files, login)

    def _shared_credentials(self, seen: ObservedRedis, secret: SecretData) -> ObservedRedis:
        self._accept(secret)  # shared credentials have no users
        return replace(seen, state="Shared", reason=self._shared)

    def _publish(self, seen: ObservedRedis) -> None:
        if seen != self.seen:
            self.seen = seen
            self._on_change()

    def _log(self, problem: str) -> None:
        if problem != self._problem:
            log.log(logging.WARNING if problem else logging.INFO, "redis credentials: %s", problem or "no problem")
        self._problem = problem


def _read(path: str) -> str:
    """Return the text of a file. Raises OSError, which is one of REDIS_ERRORS."""
    return Path(path).read_text(encoding="utf-8")
