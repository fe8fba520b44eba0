"""Tables of a source's fields: where each goes, and how its value is converted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, quantity, show

Target = str | Callable[[Draft, Any, str], None]


@dataclass(frozen=True)
class Field:
    """A row of a table: a path of the source, where it goes (a path below spec, or a function), and the conversion of its value."""

    path: str
    target: Target
    convert: Callable[[Any], Any] = lambda value: value


def apply(table: tuple[Field, ...], fields: Fields, draft: Draft) -> None:
    """Carry over the fields of a table. Raises NotMigratable."""
    for row in table:
        if (value := fields.take(row.path)) in (None, "", [], {}):
            continue
        source = fields.at(row.path)
        try:
            converted = row.convert(value)
            if isinstance(row.target, str):
                draft.put(row.target, converted, source)
            else:
                row.target(draft, converted, source)
        except NotMigratable:
            raise
        except (ValueError, TypeError, KeyError, AttributeError):
            raise NotMigratable(f"{source}: {show(value, row.path)} is not understood: correct it") from None


def flag(name: str) -> Target:
    """Return the target of a field that stands for a flag of vLLM."""
    return lambda draft, value, source: draft.flag(name, source, quantity(value))


def switches(on: str, off: str = "") -> Target:
    """Return the target of a boolean that stands for one of two flags."""
    return lambda draft, value, source: draft.flag(on if value else off, source) if value or off else None


def to_pod(name: str) -> Target:
    """Return the target of a field that is one of the PodSpec."""
    return lambda draft, value, source: draft.pod.update({name: value})


def node_terms(draft: Draft, value: Any, source: str) -> None:
    """Require one of these nodeSelectorTerms."""
    draft.pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": value}}}
