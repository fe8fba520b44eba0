"""The operator's own connection to Redis, as the administrator."""

import hashlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairlead_index.redis.access import FILES, RedisAccess
from fairlead_index.redis.client import RedisClient
from fairlead_index.redis.connection import ReplyError
from fairlead_operator.config import OperatorConfig
from fairlead_operator.credentials.secret_data import SecretData

TIMEOUT = 5.0  # seconds for one command
USERNAME = "fairlead-operator"
"""Administrator of the chart's Redis."""
RELOAD_PERIOD = 60.0  # seconds between two reloads of the server's certificate: no event shows when the kubelet has renewed the file
_REFUSED = frozenset({"WRONGPASS", "NOAUTH"})


class LoginRefused(Exception):
    """Redis rejects all of the administrator's passwords."""


@dataclass(frozen=True)
class Login:
    """How the operator connects. `passwords` are tried in order: during a rotation a restarted server may know only the older one."""

    files: Mapping[str, str] = field(repr=False)
    passwords: tuple[str, ...] = field(repr=False)


class Administrator:
    """Keeps one connection, and the folder from which its credentials are read. The folder is private to this process."""

    def __init__(self, config: OperatorConfig) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="fairlead-redis-")
        self._connected: tuple[Login, RedisClient] | None = None
        self._mounted_passwords: dict[str, float] = {}  # recent passwords of the mounted file → until when Redis accepts them
        self._reload_at = 0.0

    def read_given(self) -> dict[str, str]:
        """Return the mounted files, by name. Raises OSError if there are none in their folder."""
        return RedisAccess(self._config.redis_url, self._config.redis_credentials).read()

    @property
    def given_username(self) -> str:
        """Return the user of the URL, in case that there is no file with it."""
        return RedisAccess(self._config.redis_url).location.username

    def list_passwords(self, given: Mapping[str, str], secret: SecretData) -> tuple[str, ...]:
        """Return the administrator's passwords, the current one first."""
        if "password" not in given:
            return tuple(password for password in (secret.password, secret.previous_password) if password)
        now, present = time.monotonic(), given["password"].strip("\r\n")
        self._mounted_passwords = {password: until for password, until in self._mounted_passwords.items() if until > now}
        self._mounted_passwords[present] = now + self._config.rotation_grace
        return present, *(password for password in self._mounted_passwords if password != present)

    async def connect(self, files: Mapping[str, str], passwords: tuple[str, ...]) -> RedisClient:
        """Return a client with the first password that Redis accepts. Raises LoginRefused, and errors of the connection."""
        login = Login({**files, "username": USERNAME} if self._config.redis_bundled else files, passwords)
        if self._connected is None or self._connected[0] != login:
            await self.disconnect()
            self._connected = login, await self._log_in(login)
        return self._connected[1]

    async def _log_in(self, login: Login) -> RedisClient:
        folder, refusal = Path(self._folder.name), ""
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        for password in login.passwords:
            for name, text in {**login.files, "password": password}.items():
                (folder / name).touch(mode=0o600)
                (folder / name).write_text(text, encoding="utf-8")
            client = RedisClient(RedisAccess(self._config.redis_url, str(folder)), TIMEOUT)
            try:
                await client.execute("PING")
                return client
            except BaseException as error:
                await client.close()
                if not isinstance(error, ReplyError) or error.code not in _REFUSED:
                    raise
                refusal = str(error)
        raise LoginRefused(f"Redis refuses the administrator's password: {refusal}")

    async def maintain(self, client: RedisClient, passwords: Sequence[str]) -> None:
        """Make the chart's Redis accept exactly `passwords` of this user, and reload its certificate from time to time."""
        hashes = [f"#{each}" for each in hashes_of(passwords)]
        await client.on_every_node("ACL", "SETUSER", USERNAME, "resetpass", *hashes)  # open connections stay open
        if self._config.redis_url.startswith("rediss") and time.monotonic() >= self._reload_at:
            _, path = await client.execute("CONFIG", "GET", "tls-cert-file")
            await client.execute("CONFIG", "SET", "tls-cert-file", path)  # the same path again reloads it (Redis 6.2 and later)
            self._reload_at = time.monotonic() + RELOAD_PERIOD

    async def disconnect(self) -> None:
        if self._connected is not None:
            await self._connected[1].close()
            self._connected = None

    async def close(self) -> None:
        await self.disconnect()
        self._folder.cleanup()


def hashes_of(passwords: Sequence[str]) -> list[str]:
    """Return the SHA-256 hashes that ACL SETUSER accepts in place of `passwords`, so that no password is sent."""
    return [hashlib.sha256(password.encode()).hexdigest() for password in passwords]
