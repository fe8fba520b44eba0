"""Parsers and model adapters of other installed packages, which register them as entry points (docs/guides/plugins.md)."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

TOOL_CALL_GROUP = "fairlead.tool_call_parsers"
REASONING_GROUP = "fairlead.reasoning_parsers"
MODEL_GROUP = "fairlead.model_adapters"


class PluginError(ValueError):
    """An installed package registers something that cannot be used. The message names the package and the entry point."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """An object that another package registers."""

    entry: EntryPoint
    value: Any

    @property
    def name(self) -> str:
        """Return the name of the entry point."""
        return self.entry.name

    @property
    def package(self) -> str:
        """Return name and version of the package."""
        return _package(self.entry)


def load_plugins(group: str, reserved: Iterable[str] = ()) -> tuple[Plugin, ...]:
    """Import and return all plug-ins of a group, in the order of their names.

    `reserved`: names that a plug-in must not have. Raises PluginError if one of them has such a name, or the name of another, or cannot be
    imported. A broken plug-in is refused even if no flag names it: with `auto` its absence would change answers without a notice.
    """
    found: dict[str, EntryPoint] = {}
    taken = frozenset(reserved)
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, _package(entry))):
        if entry.name in taken:
            raise refuse(entry, "Fairlead has a parser with this name: give the entry point another name")
        if (other := found.get(entry.name)) is not None:
            raise refuse(entry, f"package {_package(other)} has the same name: uninstall one of the two")
        found[entry.name] = entry
    return tuple(_load(entry) for entry in found.values())


def find_plugin(group: str, name: str) -> Plugin | None:
    """Import and return the plug-in of this name; None if no package registers one. Raises PluginError."""
    entries = tuple(entry_points(group=group, name=name))
    if len(entries) > 1:
        raise refuse(entries[1], f"package {_package(entries[0])} has the same name: uninstall one of the two")
    return _load(entries[0]) if entries else None


def refuse(entry: EntryPoint, problem: str) -> PluginError:
    """Return the error for a plug-in that cannot be used."""
    return PluginError(f"plug-in of package {_package(entry)} (entry point {entry.name!r} in {entry.group}): {problem}")


def _load(entry: EntryPoint) -> Plugin:
    try:
        return Plugin(entry, entry.load())
    except Exception as error:  # the package's own code runs here
        problem = f"{entry.value} cannot be imported: {type(error).__name__}: {error}"
        raise refuse(entry, f"{problem}. Reinstall or uninstall the package") from error


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"
