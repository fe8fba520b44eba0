"""Models of other services that this endpoint serves too: a file with their names and the URLs of their services, reloaded on changes."""

from pathlib import Path

import msgspec

from fairlead_router.file_follower import json_file


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
    """Without a file there are no other models."""

    def __init__(self, path: str) -> None:
        self._file = json_file("models of other services", Path(path), _File())
        self.follow = self._file.follow

    def find(self, model: str) -> Route | None:
        """Return the service of a model; of two services with one model name the first."""
        return next((service for service in self._file.content.services if model in service.models), None)

    def names(self) -> list[str]:
        """Return the models of all other services."""
        return sorted({model for service in self._file.content.services for model in service.models})
