"""Models of other services that this endpoint serves too: a file with their names and the URLs of their services, reloaded on changes."""

import asyncio
import logging
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0
_Stamp = tuple[int, int, int]


class Route(msgspec.Struct, frozen=True):
    """One service."""

    name: str
    url: str
    """Without a path, as in http://qwen.default.svc."""
    models: list[str] = []
    """Its model name, and those of its adapters."""


class _File(msgspec.Struct):
    services: list[Route] = []


class ModelRoutes:
    """The newest valid version of the file. Without a file there are no other models."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._seen: _Stamp | None = None
        self._routes: dict[str, Route] = {}
        self._problem = ""
        self.reload()

    def find(self, model: str) -> Route | None:
        return self._routes.get(model)

    def names(self) -> list[str]:
        """Return the models of all other services."""
        return sorted(self._routes)

    def reload(self) -> None:
        """Read the file if it has changed. Kubernetes replaces a symbolic link, so the link's target is compared."""
        stamp: _Stamp | None = None
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp == self._seen:
                return
            services = msgspec.json.decode(self._path.read_bytes(), type=_File).services
        except FileNotFoundError:
            services = []
        except (OSError, msgspec.MsgspecError) as error:
            if str(error) != self._problem:
                logger.error("model routes %s cannot be used; the previous version stays in use: %s", self._path, error)
            self._problem = str(error)
            return
        # Of two services with one model name the first counts.
        routes = {model: service for service in reversed(services) for model in service.models}
        if routes != self._routes:
            logger.info("models of other services: %s", ", ".join(f"{model} at {route.name}" for model, route in sorted(routes.items())))
        self._seen, self._routes, self._problem = stamp, routes, ""

    async def follow(self) -> None:
        """Reload the file while it changes, without end."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()
