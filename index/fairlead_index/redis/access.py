"""The address of Redis and its credentials: one URL, and a folder for secrets."""

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


FILES: Final = ("username", "password", "ca.crt", "tls.crt", "tls.key", "sentinel-username", "sentinel-password")
"""Files of a folder with credentials, as a mounted Secret has them. Each is optional."""


@dataclass(frozen=True)
class RedisAccess:
    """One Redis, Cluster or Sentinel group, and the folder with the credentials for its connections (`FILES`).

    Each new connection reads the files again, so a rotated Secret needs no restart. `rediss` verifies the server's certificate and its name
    against `ca.crt`, or against the system's authorities. The verification cannot be turned off.
    """

    url: str
    credentials: str = ""
    location: "Location" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", parse_url(self.url))

    def read(self) -> dict[str, str]:
        """Return the contents of the files that exist, by name. Raises OSError for none, or for certificates without TLS."""
        if not self.credentials:
            return {}
        found = {name: path.read_text(encoding="utf-8") for name in FILES if (path := Path(self.credentials, name)).is_file()}
        if not found:
            raise FileNotFoundError(f"no credentials for redis in {self.credentials}; does the Secret exist in this namespace?")
        if not self.location.tls and (unused := [name for name in found if name in ("ca.crt", "tls.crt", "tls.key")]):
            raise OSError(f"{self.credentials}/{unused[0]} is for TLS: give a rediss:// URL, or remove the file")
        return found

    def login(self) -> tuple[str, str]:
        """Return user and password for a new connection. With an empty password no AUTH is sent. Raises OSError."""
        files = self.read()
        return (
            files.get("username", self.location.username).strip("\r\n"),
            files.get("password", self.location.password).strip("\r\n"),
        )

    def sentinel_login(self) -> tuple[str, str]:
        """Return user and password for the sentinels, which know none of the primary's users. Raises OSError."""
        files = self.read()
        return files.get("sentinel-username", "").strip("\r\n"), files.get("sentinel-password", "").strip("\r\n")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of a new connection. Raises OSError for a file that is missing or is not a certificate."""
        if not self.location.tls:
            return None
        files = self.read()
        try:
            context = ssl.create_default_context(cafile=f"{self.credentials}/ca.crt" if "ca.crt" in files else None)
            if "tls.crt" in files or "tls.key" in files:
                context.load_cert_chain(f"{self.credentials}/tls.crt", f"{self.credentials}/tls.key")
        except OSError as error:  # ssl.SSLError is one
            raise OSError(f"certificates for redis in {self.credentials}: {error}") from error
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
        raise ValueError("takes no ?options: give certificates and passwords as files")
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


def has_password(url: str) -> bool:
    """Return whether the URL contains a password. A user with the right to list processes or pods can read it there."""
    return ":" in url.partition("://")[2].rpartition("@")[0]
