"""The parsers by name: those of Fairlead, and those that other installed packages register as entry points."""

from dataclasses import dataclass
from functools import cache

from fairlead_worker.parsing.json_calls import JSON_CALLS, Format
from fairlead_worker.parsing.parameter_calls import PARAMETER_CALLS
from fairlead_worker.parsing.pythonic import PythonicFormat
from fairlead_worker.parsing.reasoning import REASONING_FORMATS, ReasoningFormat
from fairlead_worker.plugins import REASONING_GROUP, TOOL_CALL_GROUP, Plugin, load_plugins, refuse

CALLS: dict[str, Format] = {**JSON_CALLS, **PARAMETER_CALLS, "pythonic": PythonicFormat()}
HARMONY = "harmony"
RESERVED = ("auto", "none", HARMONY)
"""Values of the flags that are not formats."""


@dataclass(frozen=True, slots=True)
class ToolCallParser:
    """A format of tool calls from another package."""

    format: Format
    """A `JsonFormat`, a `ParameterFormat`, or an object with the same members."""
    signs: tuple[str, ...] = ()
    """Strings that are all in a chat template that teaches this format. Empty: `auto` never selects it."""
    markup: tuple[str, ...] = ()
    """Markup besides `format.markers`. Special tokens in it stay visible to the parser."""


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """A format of reasoning from another package."""

    format: ReasoningFormat
    signs: tuple[str, ...] = ()
    """As in `ToolCallParser`."""


@cache
def tool_call_plugins() -> dict[str, ToolCallParser]:
    """Return the formats of tool calls of other packages by name. Raises PluginError if one of them cannot be used."""
    found: dict[str, ToolCallParser] = {}
    for plugin in load_plugins(TOOL_CALL_GROUP, (*RESERVED, *CALLS)):
        value = plugin.value
        if not isinstance(value, ToolCallParser):
            raise refuse(plugin.entry, f"it is a {type(value).__name__}, and must be a {__name__}.ToolCallParser")
        if not isinstance(value.format, Format):
            raise refuse(plugin.entry, "its format must have `markers`, `at_start` and `stage`, like a JsonFormat")
        _check_signs(plugin, value.signs)
        found[plugin.name] = value
    return found


@cache
def reasoning_plugins() -> dict[str, ReasoningParser]:
    """Return the formats of reasoning of other packages by name. Raises PluginError if one of them cannot be used."""
    found: dict[str, ReasoningParser] = {}
    for plugin in load_plugins(REASONING_GROUP, (*RESERVED, *REASONING_FORMATS)):
        value = plugin.value
        if not isinstance(value, ReasoningParser) or not isinstance(value.format, ReasoningFormat):
            problem = f"it is a {type(value).__name__}, and must be a {__name__}.ReasoningParser with a ReasoningFormat"
            raise refuse(plugin.entry, problem)
        _check_signs(plugin, value.signs)
        found[plugin.name] = value
    return found


def find_call_format(name: str) -> Format | None:
    """Return the format of tool calls with this name; None if there is none."""
    plugin = tool_call_plugins().get(name) if name and name not in (*RESERVED, *CALLS) else None
    return plugin.format if plugin else CALLS.get(name)


def find_reasoning_format(name: str) -> ReasoningFormat | None:
    """Return the format of reasoning with this name; None if there is none. It does not know harmony."""
    plugin = reasoning_plugins().get(name) if name and name not in (*RESERVED, *REASONING_FORMATS) else None
    return plugin.format if plugin else REASONING_FORMATS.get(name)


def _check_signs(plugin: Plugin, signs: object) -> None:
    """Raise PluginError unless `signs` are strings in a tuple. A single string would be read as its letters, and match any template."""
    if not isinstance(signs, tuple) or not all(isinstance(sign, str) and sign for sign in signs):
        raise refuse(plugin.entry, f"signs is {signs!r}: it must be a tuple of strings, as in ('<call>',)")
