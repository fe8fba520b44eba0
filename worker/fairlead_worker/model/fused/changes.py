"""Changes of modules that can be undone."""

from typing import Any

MISSING = object()


class Unfused(Exception):
    """Why an operation keeps its plain form."""


class Changes:
    """Attributes that were set, with what they were before."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __len__(self) -> int:
        return len(self._before)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute that is the object's own, or its class's."""
        self._before.append((owner, name, vars(owner).get(name, MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all, the latest first."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
