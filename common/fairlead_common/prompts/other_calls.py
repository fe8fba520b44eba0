"""Custom tools, and the function calls of OpenAI's first API, as functions and tool calls: templates know no others."""

from typing import Any

import msgspec

INPUT = "input"
"""The only argument of a custom tool as a function."""


def custom_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a custom tool, from its name, description and format, as a function with one text.

    The model reads the grammar of the text in the description: an answer that may be something else has no constraint.
    """
    description, form = tool.get("description"), tool.get("format")
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}  # chats have the grammar in an object of its own
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        follows = f"The input follows this {grammar.get('syntax', '')} grammar:\n{grammar['definition']}"
        description = f"{description}\n\n{follows}" if description else follows
    schema = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT], "additionalProperties": False}
    function = {"name": tool.get("name"), "description": description, "parameters": schema}
    return {field: value for field, value in function.items() if value is not None}


def write_input(text: str) -> str:
    """Return a custom tool's input as the arguments of its function."""
    return msgspec.json.encode({INPUT: text}).decode()


def as_functions(tools: Any) -> Any:
    """Return a chat's tools with each custom tool as a function. Other values are unchanged."""
    if not isinstance(tools, list) or not any(_is_custom(tool) for tool in tools):
        return tools
    return [{"type": "function", "function": custom_function(tool["custom"])} if _is_custom(tool) else tool for tool in tools]


def as_tool_calls(messages: Any) -> Any:
    """Return a chat's messages with custom calls and `function_call` as tool calls, and results of the role `function` as of tools."""
    if not isinstance(messages, list) or not any(isinstance(each, dict) and _has_other_calls(each) for each in messages):
        return messages
    converted, last_call = [], None
    for at, message in enumerate(messages):
        match message:
            case {"role": "assistant", "function_call": {"name": str()} as function} if not message.get("tool_calls"):
                last_call = f"call_{at}"
                others = {name: value for name, value in message.items() if name != "function_call"}
                message = {**others, "tool_calls": [{"id": last_call, "type": "function", "function": function}]}
            case {"role": "function"} if last_call is not None:
                message = {"role": "tool", "tool_call_id": last_call, "content": message.get("content") or ""}
            case {"tool_calls": list(calls)}:
                message = {**message, "tool_calls": [_as_function_call(call) for call in calls]}
        converted.append(message)
    return converted


def _is_custom(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "custom" and isinstance(tool.get("custom"), dict)


def _has_other_calls(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return (
        message.get("function_call") is not None
        or message.get("role") == "function"
        or (isinstance(calls, list) and any(map(_is_custom, calls)))
    )


def _as_function_call(call: Any) -> Any:
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": write_input(text)}}
    return call
