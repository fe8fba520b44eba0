"""Models of other services that this endpoint serves too: a file with their names and the URLs of their services, reloaded on changes."""

import asyncio
import logging
from pathlib import Path

import msgspec

from fairlead_router.file_follower import FileFollower

logger = logging.getLogger(__name__)

RELOAD_SECONDS = 1.0


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
        self._file = FileFollower(lambda: msgspec.json.decode(self._path.read_bytes(), type=_File), self._path)
        self._routes: dict[str, Route] = {}
        self._problem = ""
        self.reload()

    def find(self, model: str) -> Route | None:
        return self._routes.get(model)

    def names(self) -> list[str]:
        """Return the models of all other services."""
        return sorted(self._routes)

    def reload(self) -> None:
        """Read the file if it has changed."""
        try:
            file = self._file.poll()
        except FileNotFoundError:
            file = _File()
        except (OSError, msgspec.MsgspecError) as error:
            if str(error) != self._problem:
                logger.error("model routes %s cannot be used; the previous version stays in use: %s", self._path, error)
            self._problem = str(error)
            return
        if file is None:
            return
        # Of two services with one model name the first counts.
        routes = {model: service for service in reversed(file.services) for model in service.models}
        if routes != self._routes:
            logger.info("models of other services: %s", ", ".join(f"{model} at {route.name}" for model, route in sorted(routes.items())))
        self._routes, self._problem = routes, ""

    async def follow(self) -> None:
        """Reload the file while it changes, without end."""
        while True:
            await asyncio.sleep(RELOAD_SECONDS)
            self.reload()
