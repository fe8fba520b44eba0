"""The address of Redis and its credentials: one URL, and files for secrets."""

import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

PORT: Final = 6379
SENTINEL_PORT: Final = 26379
SCHEMES: Final = ("redis", "rediss", "redis+sentinel", "rediss+sentinel", "unix")

Address = tuple[str, int]
"""Host and port; for a unix socket its path and 0."""


@dataclass(frozen=True)
class RedisAccess:
    """One Redis, Cluster or Sentinel group, and the credential files for its connections.

    Each new connection reads the files again, so a rotated Secret needs no restart. `rediss` verifies the server's certificate and its name
    against `ca_file`, or against the system's authorities. The verification cannot be turned off.
    """

    url: str
    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    username_file: str = ""
    sentinel_username_file: str = ""
    sentinel_password_file: str = ""
    location: "Location" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        location = parse_url(self.url)
        if (self.ca_file or self.cert_file) and not location.tls:
            raise ValueError(f"redis url {redact_url(self.url)!r} has no TLS: give rediss://, or no certificate files")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("redis client certificate: give both the certificate's file and its key's")
        if (self.sentinel_username_file or self.sentinel_password_file) and not location.sentinel:
            raise ValueError(f"redis url {redact_url(self.url)!r} names no sentinels: give redis+sentinel://, or no credentials for them")
        object.__setattr__(self, "location", location)

    def credentials(self) -> tuple[str, str]:
        """Return user and password for a new connection. With an empty password no AUTH is sent. Raises OSError for a missing file."""
        username = _read_secret(self.username_file, "username") or self.username or self.location.username
        return username, _read_secret(self.password_file, "password") or self.location.password

    def sentinel_credentials(self) -> tuple[str, str]:
        """Return user and password for the sentinels, which know none of the primary's users. Raises OSError for a missing file."""
        return (
            _read_secret(self.sentinel_username_file, "sentinel username"),
            _read_secret(self.sentinel_password_file, "sentinel password"),
        )

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a new connection. Raises OSError for a file that is missing or is not a certificate."""
        if not self.location.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except OSError as error:  # ssl.SSLError is one
            files = ", ".join(name for name in (self.ca_file, self.cert_file, self.key_file) if name)
            raise OSError(f"certificates for redis ({files}): {error}") from error
        return context


@dataclass(frozen=True)
class Location:
    """A parsed URL. `nodes` are tried in turn. Any node of a Cluster knows the others; with Sentinel the nodes are the sentinels."""

    nodes: tuple[Address, ...]
    tls: bool = False
    sentinel: str = ""  # name of the primary that the sentinels watch
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)


def parse_url(url: str) -> Location:
    """Parse a Redis URL. Raises ValueError for a URL that can never work."""
    try:
        return _parse(url)
    except ValueError as error:
        raise ValueError(f"redis url {redact_url(url)!r}: {error}") from None


def _parse(url: str) -> Location:
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"give one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.query or parts.fragment:
        raise ValueError("takes no ?options: give certificates and passwords by their flags")
    if parts.scheme == "unix":
        if not parts.path or parts.netloc:
            raise ValueError("give unix:///PATH")
        return Location(nodes=((unquote(parts.path), 0),))
    user_info, _, hosts = parts.netloc.rpartition("@")
    username, _, password = user_info.partition(":")
    scheme, _, sentinel = parts.scheme.partition("+")
    tail = parts.path.strip("/")
    if sentinel and not tail:
        raise ValueError("give the name that the sentinels know the primary by: redis+sentinel://HOST:26379/NAME")
    if not sentinel and tail and not tail.isdecimal():
        raise ValueError(f"database {tail!r} is not a number")
    return Location(
        nodes=tuple(_address(host, SENTINEL_PORT if sentinel else PORT) for host in hosts.split(",")),
        tls=scheme == "rediss",
        sentinel=tail if sentinel else "",
        database=0 if sentinel else int(tail or 0),
        username=unquote(username),
        password=unquote(password),
    )


def _address(text: str, port: int) -> Address:
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/\s]+))(?::(\d{1,5}))?", text)
    if found is None or not 0 < int(found[3] or port) < 65536:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return found[1] or found[2], int(found[3] or port)


def redact_url(url: str) -> str:
    """Return the URL without its password and without anything after a `?`, for logs."""
    scheme, separator, rest = url.partition("://")
    user_info, at, hosts = rest.rpartition("@")
    user = user_info.partition(":")[0]
    masked = f"{user}:***@" if ":" in user_info else f"{user}@" if at else ""
    return f"{scheme}{separator}{masked}{hosts.partition('?')[0]}"


def _read_secret(file: str, what: str) -> str:
    """Return the text of `file` without its line end; empty without a file."""
    try:
        return Path(file).read_text(encoding="utf-8").strip("\r\n") if file else ""
    except OSError as error:
        raise OSError(f"no {what} for redis: {error}; does the Secret exist in this namespace?") from error


def has_password(url: str) -> bool:
    """Return whether the URL contains a password. A user with the right to list processes or pods can read it there."""
    return ":" in url.partition("://")[2].rpartition("@")[0]
