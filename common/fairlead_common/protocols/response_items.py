"""Input items of the Responses API, as messages of a chat.

Items of built-in tools and stored state are text or left out, and noted: a client sends its whole history with each request, so one item
that is refused ends the conversation.
"""

from typing import Any

from fairlead_common.prompts.content_parts import json_type
from fairlead_common.prompts.other_calls import write_input
from fairlead_common.prompts.plain_text import MEDIA, is_media, write_arguments, write_carried, write_json
from fairlead_common.protocols.chat_builder import ChatBuilder, join_texts
from fairlead_common.protocols.conversion import Omissions
from fairlead_common.protocols.fields import check_text, iterate_objects, refuse, require_text
from fairlead_common.protocols.response_tools import ToolReader, flat_name
from fairlead_common.truncate import quote

_LEFT_OUT = (
    "compaction", "compaction_summary", "compaction_trigger", "configuration_update", "context_compaction", "item_reference",
    "mcp_approval_request", "mcp_approval_response", "mcp_list_tools",
)  # fmt: skip
"""Items that only their issuer can read, or that name things of its service."""
_TEXTS = dict.fromkeys(("input_text", "output_text", "text", "summary_text", "reasoning_text"), "text") | {"refusal": "refusal"}
"""Types of parts that are text, with the field that has it."""
_CALL, _RESULT = "_call", "_call_output"


class ItemReader:
    """Adds items to a chat, and the tools in them to the tools of the request."""

    def __init__(self, chat: ChatBuilder, tools: ToolReader, omissions: Omissions) -> None:
        self._chat = chat
        self._tools = tools
        self._omissions = omissions

    def add(self, items: list[Any]) -> None:
        given = list(iterate_objects(items, "input"))
        if all(item.get("type") in _LEFT_OUT for _, item in given):
            refuse("input", "has only items that cannot be read here; send the conversation as messages")
        last_question = max((at for at, (_, item) in enumerate(given) if item.get("role") == "user"), default=None)
        for at, (where, item) in enumerate(given):
            self._add(where, item, at == last_question)

    def _add(self, where: str, item: dict[str, Any], is_last: bool) -> None:
        match item.get("type", "message"):
            case "message":
                self._add_message(where, item, is_last)
            case "function_call":
                name = flat_name(require_text(item, "name", where), item.get("namespace"))
                self._chat.add_tool_call(require_text(item, "call_id", where), name, write_arguments(item.get("arguments")))
            case "custom_tool_call":
                name = flat_name(require_text(item, "name", where), item.get("namespace"))
                self._chat.add_tool_call(require_text(item, "call_id", where), name, write_input(require_text(item, "input", where)))
            case "function_call_output" | "custom_tool_call_output":
                self._chat.add_tool_result(require_text(item, "call_id", where), self._output(item.get("output"), f"{where}.output"))
            case "reasoning":
                if reasoning := self._reasoning(where, item):
                    self._chat.add_reasoning(reasoning)
            case "additional_tools" | "tool_search_output" as kind:
                self._tools.add(item.get("tools") or [], f"{where}.tools", skips_known=True)
                if kind == "tool_search_output" and isinstance(item.get("call_id"), str):
                    self._chat.add_tool_result(item["call_id"], write_json(item.get("tools")))
            case "agent_message":
                text = f"{item.get('author')} to {item.get('recipient')}:"
                parts = self._content(item.get("content") or [], f"{where}.content", False)
                self._chat.add_message("user", join_texts([text, *parts]))
            case str() as kind if kind in _LEFT_OUT:
                self._omissions.leave_out(where, kind)
            case str() as kind:
                self._add_other(where, kind, item)
            case kind:
                refuse(f"{where}.type", f"must be a string, not {json_type(kind)}")

    def _add_message(self, where: str, item: dict[str, Any], is_last: bool) -> None:
        role, given = item.get("role"), item.get("content")
        if role not in ("user", "assistant", "system", "developer"):
            refuse(f"{where}.role", f"is {quote(role)}; it must be user, assistant, system or developer")
        if role == "assistant" and given is None:
            return
        if isinstance(given, str):
            content: Any = given
        elif texts := self._content(given, f"{where}.content", is_last):
            content = join_texts(texts)
        elif given:
            return
        else:
            content = []
        if role == "assistant":
            self._chat.add_answer(content)
        else:
            self._chat.add_message("system" if role == "developer" else role, content)

    def _add_other(self, where: str, kind: str, item: dict[str, Any]) -> None:
        """Add an item of a built-in tool: its call and result where both have an id, else its JSON as text of the assistant."""
        call = item.get("call_id") or (item.get("id") if kind.endswith(_RESULT) else None)
        if kind.endswith(_RESULT) and isinstance(call, str):
            self._chat.add_tool_result(call, self._output(item.get("output"), f"{where}.output"))
        elif kind.endswith(_CALL) and isinstance(call, str):
            fields = next((item[name] for name in ("action", "operation", "arguments") if isinstance(item.get(name), dict)), item)
            write = write_json if fields is item else write_carried
            # The type of an action or an operation says what it does, except that of a local shell, which only runs programs.
            has_type = fields is not item and kind != "local_shell_call"
            arguments = write({name: value for name, value in fields.items() if name != "type" or has_type})
            self._chat.add_tool_call(call, kind.removesuffix(_CALL), arguments)
        else:
            self._omissions.pass_as_text(where, kind)
            shown = {name: value for name, value in item.items() if (kind, name) != ("image_generation_call", "result")}
            self._chat.add_answer(write_json(shown))

    def _output(self, output: Any, where: str) -> Any:
        """Return a tool's result. Built-in tools have objects of their own kind."""
        if isinstance(output, str):
            return output
        if isinstance(output, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in output):
            return join_texts(self._content(output, where, False) or [""])
        return "" if output is None else write_carried(output)

    def _content(self, content: Any, where: str, needs_media: bool) -> list[str]:
        """Return the texts of parts. `needs_media`: refuse a picture or a file, because an answer without it would be wrong."""
        if not isinstance(content, list):
            refuse(where, f"must be a string or a list of parts, not {json_type(content)}")
        return [text for at, part in iterate_objects(content, where) for text in self._part(part, at, needs_media)]

    def _part(self, part: dict[str, Any], where: str, needs_media: bool) -> list[str]:
        kind = part.get("type")
        match kind:
            case str() if kind in _TEXTS:
                return [require_text(part, _TEXTS[kind], where)]
            case "encrypted_content":
                self._omissions.leave_out(where, kind)
                return []
            case str() if not needs_media and (is_media(part) or kind.startswith("input_") or kind.endswith("_screenshot")):
                self._omissions.leave_out(where, kind)
                return [MEDIA.format(kind=kind)]
            case str() if not needs_media:
                self._omissions.pass_as_text(where, kind)
                return [write_json(part)]
        return refuse(f"{where}.type", f"is {quote(kind)}: this model reads text only")

    def _reasoning(self, where: str, item: dict[str, Any]) -> str:
        """Return the reasoning's text, or its summary if it has no text."""
        for field, separator in (("content", ""), ("summary", "\n\n")):
            parts = iterate_objects(item.get(field) or [], f"{where}.{field}")
            if reasoning := separator.join(check_text(part.get("text") or "", f"{at}.text") for at, part in parts):
                return reasoning
        if item.get("encrypted_content"):
            self._omissions.leave_out(where, "encrypted_reasoning")
        return ""
