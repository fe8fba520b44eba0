"""Discovery of workers: `dns://HOST:PORT` (every address record), `file:///path` (one HOST:PORT a line), `static://a:1,b:2`."""

import asyncio
import contextlib
import re
import socket
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

_NO_RECORDS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME), getattr(socket, "EAI_ADDRFAMILY", socket.EAI_NONAME)}
"""Errors of getaddrinfo for a name without an address of this family."""


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`. Raises ValueError with the address."""
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


class DiscoveryError(Exception):
    """Discovery failed for now. Callers keep the known workers."""


class Source(Protocol):
    """The interface of all sources."""

    async def addresses(self) -> set[str]:
        """Return `host:port` of every current worker. Raises DiscoveryError."""


class StaticSource:
    """A fixed list. Raises ValueError, which names `flag`, if it is empty or has an invalid address."""

    def __init__(self, listed: str, flag: str = "--workers") -> None:
        self._addresses = {part.strip() for part in listed.split(",") if part.strip()}
        if not self._addresses:
            raise ValueError(f"{flag} static:// names no worker: give static://host:port,host:port")
        for address in self._addresses:
            split_address(address)

    async def addresses(self) -> set[str]:
        return self._addresses


class FileSource:
    """Lines of HOST:PORT; empty lines and `#` comments are ignored. Its owner replaces it by renaming a complete file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def addresses(self) -> set[str]:
        try:
            lines = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryError(f"{self._path}: {error}") from error
        found = {line.split("#")[0].strip() for line in lines.splitlines()} - {""}
        try:
            for address in found:
                split_address(address)
        except ValueError as error:
            raise DiscoveryError(f"{self._path}: {error}") from error
        return found


class DnsSource:
    """A headless Service: every A record of its name, or AAAA if it has no A. In a dual-stack cluster each pod has both."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port

    async def addresses(self) -> set[str]:
        loop = asyncio.get_running_loop()
        problem: OSError | None = None
        for family in (socket.AF_INET, socket.AF_INET6):
            try:
                found = await loop.getaddrinfo(self._host, self._port, family=family, type=socket.SOCK_STREAM)
            except OSError as error:
                problem = problem or error
                if error.errno not in _NO_RECORDS:
                    break  # the server failed: the other family's reply would replace all known workers
                continue
            hosts = {str(where[0]) for *_, where in found}
            return {f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts}
        # This includes a headless Service without a ready pod. The known workers stay, and health checks decide.
        raise DiscoveryError(f"{self._host}: {problem}")


def create_source(url: str, flag: str = "--workers") -> Source:
    """Create the source for `url`, the value of `flag`. Raises ValueError."""
    if url.startswith("static://"):
        return StaticSource(url.removeprefix("static://"), flag)
    with contextlib.suppress(ValueError):  # urlsplit raises it for a port or an IPv6 address that is not valid
        parts = urlsplit(url)
        if parts.scheme == "file":
            return FileSource(Path(parts.path))
        if parts.scheme == "dns" and parts.hostname and parts.port:
            return DnsSource(parts.hostname, parts.port)
    raise ValueError(f"{flag} {url!r}: give dns://HOST:PORT, file:///path or static://host:port,host:port")
