"""Tools of Anthropic's messages, as functions of a chat."""

from typing import Any

from fairlead_common.prompts.content_parts import json_type
from fairlead_common.protocols.conversion import Omissions
from fairlead_common.protocols.fields import iterate_objects, refuse, require_text
from fairlead_common.protocols.known_tools import ANTHROPIC
from fairlead_common.truncate import quote

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ELSEWHERE = "it runs at Anthropic or has no schema here"


def read_tools(given: list[Any] | None, choice: dict[str, Any] | None, omissions: Omissions) -> tuple[dict[str, Any], list[str]]:
    """Return the chat's fields of the tools, and the field of the body for each tool.

    All tools are offered at once, so `defer_loading` has no effect. A tool that runs at Anthropic is left out.
    """
    tools: list[dict[str, Any]] = []
    fields: list[str] = []
    left_out: set[str] = set()
    for where, tool in iterate_objects(given or [], "tools"):
        if (function := _function(where, tool)) is not None:
            tools.append({"type": "function", "function": function})
            fields.append(where)
        else:
            omissions.leave_out(where, tool["type"])
            left_out.add(str(tool.get("name")))
    chosen, parallel = _choice(choice)
    if isinstance(chosen, dict) and (name := chosen["function"]["name"]) in left_out - {tool["function"]["name"] for tool in tools}:
        refuse("tool_choice.name", f"{quote(name)} cannot be called: {_ELSEWHERE}")
    return {"tools": tools or None, "tool_choice": chosen, "parallel_tool_calls": parallel}, fields


def _function(where: str, tool: dict[str, Any]) -> dict[str, Any] | None:
    """Return the function, or None for a tool that cannot be offered."""
    kind, schema, description = tool.get("type"), tool.get("input_schema"), tool.get("description")
    if kind not in (None, "custom") and not isinstance(schema, dict):
        if not isinstance(kind, str) or kind not in ANTHROPIC:
            return None
        description, schema = ANTHROPIC[kind]
    name = require_text(tool, "name", where)
    if not isinstance(schema, dict):
        refuse(f"{where}.input_schema", f"must be a JSON schema, not {json_type(schema)}")
    function = {"name": name, "parameters": schema, "description": description, "strict": tool.get("strict")}
    return {field: value for field, value in function.items() if value is not None}


def _choice(given: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """Return a chat's tool_choice and parallel_tool_calls."""
    if given is None:
        return None, None
    parallel = False if given.get("disable_parallel_tool_use") is True else None
    match given.get("type"):
        case "tool":
            return {"type": "function", "function": {"name": require_text(given, "name", "tool_choice")}}, parallel
        case "auto" | "any" | "none" as kind:
            return _CHOICES[kind], parallel
        case kind:
            return refuse("tool_choice.type", f"is {quote(kind)}; it must be auto, any, tool or none")
