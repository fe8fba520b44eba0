"""Objects within request bodies, for `GET /openapi.json`.

Handlers take them as they are: the chat template and the code that converts an API to chats check them, and errors name the place.
"""

from typing import Any, Literal

import msgspec

from fairlead_worker.api.answers.completions import ToolCall

Json = dict[str, Any]


class ChatMessage(msgspec.Struct):
    """A message of a chat. Templates can read further fields."""

    role: str
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | list[Json] | None = None
    """A text, or parts of `type: text`. Null beside `tool_calls`."""
    tool_calls: list[ToolCall] | None = None
    """Calls of an assistant message."""
    tool_call_id: str | None = None
    """The call that a message of role `tool` answers."""


class ChatFunction(msgspec.Struct):
    """A function that the model can call."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    """A JSON schema of the arguments."""


class ChatTool(msgspec.Struct):
    """A tool of a chat."""

    type: Literal["function"]
    function: ChatFunction


class InputMessage(msgspec.Struct):
    """A message for Anthropic's API."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Json]
    """A text, or blocks."""


class InputTool(msgspec.Struct):
    """A tool for Anthropic's API."""

    name: str
    input_schema: Json
    """A JSON schema of the arguments."""
    description: str | None = None


ITEMS: dict[tuple[str, str], type[msgspec.Struct]] = {
    ("ChatRequest", "messages"): ChatMessage,
    ("ChatRequest", "tools"): ChatTool,
    ("TokenizeRequest", "messages"): ChatMessage,
    ("TokenizeRequest", "tools"): ChatTool,
    ("MessagesBody", "messages"): InputMessage,
    ("MessagesBody", "tools"): InputTool,
}
"""By request struct and field: the objects in a list."""


def describe_lists(name: str, properties: dict[str, Any]) -> None:
    """Name the objects in the lists of the struct `name`, in place. A list without a model takes anything."""
    for field, node in properties.items():
        for kind in node.get("anyOf", [node]):
            if kind.get("type") != "array":
                continue
            if model := ITEMS.get((name, field)):
                kind["items"] = {"$ref": f"#/components/schemas/{model.__name__}"}
            kind.setdefault("items", {})
