"""The fields of a source object, of which each is read or listed, and conversions of their values."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

import yaml

TEMPLATE = re.compile(r"\{\{[-\s]*(\.(Values|Release|Chart|Capabilities|Files)\b|include |template |toYaml |tpl |if |range |with |end\b)")
RENDER = "is a Helm template: render it first, `helm template NAME CHART -f values.yaml | fairlead migrate -f -`"
NO_FIELD = "no such field in an InferenceService: check whether you need it"
_SECRET = re.compile(
    r"(\b|[_-])token$|(?-i:[a-z]Token$)|(api|access|private)_?-?key|password|secret_|credential|bearer|^authorization$", re.IGNORECASE
)
_NAMES = re.compile(r"""(?<![\w.-])(?:-+[\w.-]+|[\w.-]+(?=\\?["']?\s*[=:]))""")
"""Flags, and names before `=` and `:`, in a text."""
_SHOWN = 60
"""Characters of a value that a note quotes."""
_REASONS = yaml.safe_load(files(__package__).joinpath("reasons.yaml").read_text())


class NotMigratable(ValueError):
    """An object cannot become a valid InferenceService. The message names its field, the value and what to do."""


@dataclass(frozen=True)
class Fields:
    """A part of a source object. `used` has the paths that were read in the whole object, the last one last."""

    data: Any
    path: str = ""
    used: dict[str, bool] = field(default_factory=dict)

    def at(self, path: str) -> str:
        return f"{self.path}.{path}".lstrip(".")

    def mark(self) -> None:
        """Mark this section as read."""
        self.used[self.path] = True

    def look(self, path: str, default: Any = None) -> Any:
        """Return the value at a path such as `spec.model.uri` without marking it as read."""
        value = self.data
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return default if value is None else value

    def take(self, path: str, default: Any = None) -> Any:
        """Return the value at a path, and mark everything below it as read."""
        value = self.look(path)
        if value is not None:
            self.used[self.at(path)] = True
        return default if value is None else value

    def need(self, path: str) -> str:
        """Return a text, and mark it as read. Raises NotMigratable if there is none."""
        if not isinstance(value := self.take(path), str) or not value:
            raise NotMigratable(f"{self.at(path)} must be a text (got {show(value)}): write it")
        return value

    def part(self, path: str) -> "Fields":
        """Return a section; empty if there is none. Raises NotMigratable if the field is no section."""
        value = self.look(path, {})
        if not isinstance(value, Mapping):
            raise NotMigratable(f"{self.at(path)} must be a mapping (got {show(value)})")
        return Fields(value, self.at(path), self.used)

    def items(self, path: str) -> list["Fields"]:
        """Return the sections in a list. Raises NotMigratable if the field is no list of sections."""
        value = self.look(path, [])
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise NotMigratable(f"{self.at(path)} must be a list of mappings (got {show(value)})")
        return [Fields(item, f"{self.at(path)}[{number}]", self.used) for number, item in enumerate(value)]

    def find(self, path: str, matches: Callable[["Fields"], bool]) -> "Fields | None":
        """Return the first section of a list that matches."""
        return next((one for one in self.items(path) if matches(one)), None)

    def words(self, path: str) -> list[str]:
        """Return a command line, and mark it as read. Raises NotMigratable if it is no list of strings."""
        value = self.take(path, [])
        if not isinstance(value, list) or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in value):
            raise NotMigratable(f"{self.at(path)} must be a list of strings (got {show(value)})")
        return [str(one) for one in value]

    def left(self, reasons: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
        """Yield path, value and reason of what was not read, as few sections as contain nothing else.

        `reasons`: by path without the numbers of items. A reason is also that of the fields below; an empty one: the field needs no note.
        """
        yield from self._left(self.data, self.path, reasons, None)

    def _left(self, value: Any, path: str, reasons: Mapping[str, str], inherited: str | None) -> Iterator[tuple[str, Any, str]]:
        plain = re.sub(r"\[\d+\]", "", path)
        reason = reasons.get(plain, inherited)
        if path in self.used or reason == "" or value in (None, "", []) or (value == {} and reason is None):
            return
        inside = not path or any(one.startswith((f"{path}.", f"{path}[")) for one in self.used)
        if isinstance(value, Mapping) and (inside or any(one.startswith(f"{plain}.") for one in reasons)):
            children = {f"{path}.{name}".lstrip("."): child for name, child in value.items()}
        elif isinstance(value, list) and inside:
            children = {f"{path}[{number}]": child for number, child in enumerate(value)}
        else:
            yield path, value, NO_FIELD if reason is None else reason
            return
        for child_path, child in children.items():
            yield from self._left(child, child_path, reasons, reason)


def reasons(table: str, *prefixes: str) -> dict[str, str]:
    """Return the reason of each path in a table of `reasons.yaml`. `prefixes`: of the paths."""
    rows = ((part, why, names) for part, found in _REASONS[table].items() for why, names in found.items())
    paths = {f"{part}.{name}".lstrip("."): why for part, why, names in rows for name in names.split()}
    return {f"{prefix}.{path}".lstrip("."): why for prefix in prefixes or ("",) for path, why in paths.items()}


def show(value: Any, name: str = "") -> str:
    """Return a value for a message, shortened; nothing of a value if its field `name`, or a name in it, is that of a secret."""
    if _SECRET.search(name) or _names_secret(value):
        return "(not shown)"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _names_secret(value: Any) -> bool:
    """Return whether a key, a value of `name`, or a flag in a value is that of a secret."""
    if isinstance(value, str):
        return any(map(_SECRET.search, _NAMES.findall(value)))
    if isinstance(value, Mapping):
        return any(map(_SECRET.search, map(str, [*value, value.get("name")]))) or any(map(_names_secret, value.values()))
    return isinstance(value, list) and any(map(_names_secret, value))


def find_template(value: Any) -> str | None:
    """Return a string in a document that Helm has not rendered."""
    if isinstance(value, str):
        return value if TEMPLATE.search(value) else None
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((found for one in inside if (found := find_template(one))), None)


def quantity(value: Any) -> str:
    """Return a quantity as a string: YAML reads `cpu: 8` as a number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(value)
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def whole(value: Any) -> int:
    """Return a whole number, which may be in quotes. Raises ValueError."""
    if isinstance(value, bool) or float(value) != int(float(value)):
        raise ValueError(value)
    return int(float(value))
