"""Where workers are: `dns://HOST:PORT` (every address record), `file:///path` (one HOST:PORT a line), `static://a:1,b:2`."""

import asyncio
import contextlib
import logging
import socket
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.wire.pool import split_address

logger = logging.getLogger(__name__)

HURRY_SECONDS = 0.25
"""Between two questions, at least: the index may speak of an address that discovery does not know for long."""

_NO_RECORDS = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME), getattr(socket, "EAI_ADDRFAMILY", socket.EAI_NONAME)}
"""getaddrinfo's ways to say that the name has no address of this family."""


class Unresolved(Exception):
    """Discovery has no answer now; what was known stays."""


class Source(Protocol):
    async def addresses(self) -> set[str]:
        """`host:port` of every worker now. Raises Unresolved."""


class StaticSource:
    def __init__(self, listed: str) -> None:
        self._addresses = {part.strip() for part in listed.split(",") if part.strip()}
        if not self._addresses:
            raise ValueError("--workers static:// names no worker: give static://host:port,host:port")
        for address in self._addresses:
            split_address(address)

    async def addresses(self) -> set[str]:
        return self._addresses


class FileSource:
    """Lines of HOST:PORT; empty lines and `#` comments are passed over. Written whole and renamed by whoever owns it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def addresses(self) -> set[str]:
        try:
            lines = await asyncio.to_thread(self._path.read_text, encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise Unresolved(f"{self._path}: {error}") from error
        found = {line.split("#")[0].strip() for line in lines.splitlines()} - {""}
        try:
            for address in found:
                split_address(address)
        except ValueError as error:
            raise Unresolved(f"{self._path}: {error}") from error
        return found


class DnsSource:
    """A headless Service: every A record of its name; AAAA where there are none (in a dual-stack cluster each pod has both)."""

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
                    break  # the server failed: the other family's answer would replace every worker that is known
                continue
            hosts = {str(where[0]) for *_, where in found}
            return {f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts}
        # Also a name without records: a headless Service with no ready pod. What was known stays, and being looked at decides.
        raise Unresolved(f"{self._host}: {problem}")


def source_of(url: str) -> Source:
    """The source that `--workers` names. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "static":
        return StaticSource(url.removeprefix("static://"))
    if parts.scheme == "file":
        return FileSource(Path(parts.path))
    if parts.scheme == "dns" and parts.hostname and parts.port:
        return DnsSource(parts.hostname, parts.port)
    raise ValueError(f"--workers {url!r}: give dns://HOST:PORT, file:///path or static://host:port,host:port")


async def follow(source: Source, table: WorkerTable, interval: float, hurry: asyncio.Event) -> None:
    """Ask again every `interval` seconds, for ever, and sooner when there is `hurry`; says so once when the source stops and starts to
    answer."""
    lost = False
    while True:
        hurry.clear()
        try:
            table.discovered(await source.addresses())
            if lost:
                logger.info("discovery answers again")
            lost = False
        except Exception as error:  # whatever it is, the next answer may be good, and without this task none would come
            if not lost:
                logger.warning("discovery has no answer, the known workers stay: %s", error, exc_info=not isinstance(error, Unresolved))
            lost = True
        await asyncio.sleep(min(interval, HURRY_SECONDS))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), max(0.0, interval - HURRY_SECONDS))
