"""The items of tool calls in a response: a function, a custom tool, a shell of the client, or a search for tools."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET

from fairlead_common.protocols.conversion import OfferedTool
from fairlead_worker.api.answers.responses import (
    ArgumentsDoneEvent,
    CallDeltaEvent,
    CallEvent,
    CustomCallItem,
    FunctionCallItem,
    InputDoneEvent,
    ShellAction,
    ShellCallItem,
    ToolCallItem,
    ToolSearchItem,
)
from fairlead_worker.api.output.custom_input import CustomInput, read_input, read_object

_PREFIXES = {"function": "fc", "custom": "ctc", "local_shell": "lsh", "tool_search": "tsc"}


class CallItem:
    """One call. The model wrote the arguments of a function; the API's item can have another form."""

    def __init__(self, name: str, tool: OfferedTool | None, output_index: int) -> None:
        """`name`: in the chat. `output_index`: the place of the item."""
        self._tool, self._place = tool or OfferedTool("function", name), output_index
        self._input = CustomInput()
        self._id = ""

    def begin(self, id: str, call_id: str) -> ToolCallItem:
        """Return the item before its arguments. Its id is `id` behind a prefix."""
        self._id = f"{_PREFIXES[self._tool.kind]}_{id}"
        match self._tool.kind:
            case "custom":
                return CustomCallItem(id=self._id, call_id=call_id, name=self._tool.name, namespace=self._tool.namespace or UNSET)
            case "local_shell":
                return ShellCallItem(id=self._id, call_id=call_id, action=ShellAction())
            case "tool_search":
                return ToolSearchItem(id=self._id, call_id=call_id)
            case _:
                return FunctionCallItem(id=self._id, call_id=call_id, name=self._tool.name, namespace=self._tool.namespace or UNSET)

    def add(self, text: str) -> Iterator[CallEvent]:
        """Add a part of the arguments. Yield the stream's events."""
        if self._tool.kind == "function":
            yield CallDeltaEvent("response.function_call_arguments.delta", self._id, self._place, text)
        elif self._tool.kind == "custom":
            yield from self._input_delta(self._input.add(text))

    def finish(self, text: str) -> Iterator[CallEvent]:
        """Yield the last events before the item's own. `text`: the whole arguments."""
        if self._tool.kind == "function":
            yield ArgumentsDoneEvent(item_id=self._id, output_index=self._place, name=self._tool.name, arguments=text)
        elif self._tool.kind == "custom":
            yield from self._input_delta(self._input.finish())
            yield InputDoneEvent(item_id=self._id, output_index=self._place, input=read_input(text))

    def _input_delta(self, text: str) -> Iterator[CallEvent]:
        if text:
            yield CallDeltaEvent("response.custom_tool_call_input.delta", self._id, self._place, text)


def complete_call(item: ToolCallItem, text: str) -> ToolCallItem:
    """Return the item with its whole arguments."""
    match item:
        case CustomCallItem():
            return msgspec.structs.replace(item, input=read_input(text))
        case ShellCallItem():
            return msgspec.structs.replace(item, action=_action(read_object(text)))
        case ToolSearchItem():
            return msgspec.structs.replace(item, arguments=read_object(text))
        case FunctionCallItem():
            return msgspec.structs.replace(item, arguments=text)


def _action(arguments: dict[str, Any]) -> ShellAction:
    """Return a shell's action. A command in one text is one for a shell."""
    command = arguments.get("command") or []
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    words = [str(each) for each in command] if isinstance(command, list) else []
    return ShellAction(command=words, timeout_ms=arguments.get("timeout_ms"), working_directory=arguments.get("working_directory"))
