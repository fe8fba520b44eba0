"""Validate and normalize clients' chat messages for a template. Errors name the fields of the request."""

import json
import re
from typing import Any, Literal

from fairlead_common.errors import PromptError
from fairlead_common.json_size import MAX_OBJECTS, JsonSize, check_json
from fairlead_common.prompts.chat_template import ChatTemplate
from fairlead_common.truncate import quote

ContentStyle = Literal["text", "parts", "both"]

ROLES = ("system", "developer", "user", "assistant", "tool")
_CUSTOM_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""A custom role is text in the prompt, so it must not contain markup of a template."""
MAX_CUSTOM_ROLES = 64
"""Custom roles whose support is remembered."""
_PROBE = "fairleadprobe"
_PROBE_ARGUMENTS: tuple[Any, Any] = ({_PROBE: 1}, f'{{"{_PROBE}": 1}}')
"""Arguments of a tool call, as an object and as text."""


class ChatRenderer:
    """A template with its special tokens. Probes find the form of messages that the template expects."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = ChatTemplate(source)
        self._special_tokens = special_tokens
        self.content_style = self._probe()
        self._empty_content = self._probe_empty_content()
        self._takes_object_arguments = self._probe_arguments()
        self._has_developer_role = self._probe_role("developer")
        self._custom_roles: dict[str, bool] = {}

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, continue_final_message: bool, template_kwargs: dict[str, Any]
    ) -> str:
        """Return the prompt text, equal to transformers' `apply_chat_template` for the same arguments."""
        if continue_final_message and add_generation_prompt:
            raise PromptError("continue_final_message", "cannot be combined with add_generation_prompt")
        if not isinstance(template_kwargs, dict):
            raise PromptError("chat_template_kwargs", f"must be an object, not {json_type(template_kwargs)}")
        variables = {
            **self._special_tokens,
            "documents": None,
            **template_kwargs,
            "tools": _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(self._normalize(messages), continue_final_message, variables)

    def _normalize(self, messages: Any) -> list[dict[str, Any]]:
        if not isinstance(messages, list):
            raise PromptError("messages", f"must be a list of messages, not {json_type(messages)}")
        if not messages:
            raise PromptError("messages", "is empty: give at least one message")
        budget = _ArgumentBudget()
        return [self._normalize_message(message, f"messages[{at}]", budget) for at, message in enumerate(messages)]

    def _normalize_message(self, message: Any, where: str, budget: "_ArgumentBudget") -> dict[str, Any]:
        if not isinstance(message, dict):
            raise PromptError(where, f"must be an object with role and content, not {json_type(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise PromptError(f"{where}.role", "must be a string, such as 'user'")
        if role not in ROLES and not self._renders_role(role):
            hint = "; a tool's result has the role 'tool', with the tool_call_id" if role == "function" else ""
            reason = f"is {role!r:.40}, which the chat template does not render; it must be one of {', '.join(ROLES)}{hint}"
            raise PromptError(f"{where}.role", reason)
        # Clients send `content: null` beside tool calls; templates expect the key to be missing then.
        normal = {key: value for key, value in message.items() if value is not None}
        if role == "developer" and not self._has_developer_role:
            normal["role"] = "system"  # `developer` is the name since OpenAI's reasoning models; most templates know only `system`
        if "content" in normal:
            normal["content"] = self._normalize_content(normal["content"], f"{where}.content")
        elif role != "assistant":  # an assistant's message may have tool calls only
            raise PromptError(f"{where}.content", "is missing")
        elif "tool_calls" in normal:
            normal |= self._empty_content
        else:  # an assistant's message with reasoning alone; many templates fail without content
            normal["content"] = self._normalize_content("", f"{where}.content")
        if "tool_calls" in normal:
            normal["tool_calls"] = _tool_calls(normal["tool_calls"], f"{where}.tool_calls", self._takes_object_arguments, budget)
        return normal

    def _normalize_content(self, content: Any, where: str) -> Any:
        """Return the content as a string or as parts, in the style that the template reads."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.content_style == "parts" else content
        if not isinstance(content, list):
            raise PromptError(where, f"must be a string or a list of text parts, not {json_type(content)}")
        texts = [_part_text(part, f"{where}[{at}]") for at, part in enumerate(content)]
        return "\n".join(texts) if self.content_style == "text" else content

    def _probe(self) -> ContentStyle:
        """Return the style of content that the template reads, found by rendering one message in each style.

        A template for strings only fails on a list, drops it, or prints it as a list.
        """
        as_text = self._probe_text(_PROBE)
        as_parts = self._probe_text([{"type": "text", "text": _PROBE}])
        if as_text is not None and as_text == as_parts:
            return "both"
        if as_text is None and as_parts is not None and "'text'" not in as_parts and '"text"' not in as_parts:
            return "parts"
        return "text"

    def _probe_text(self, content: Any) -> str | None:
        text = self._try_render([{"role": "user", "content": content}])
        return text if text and _PROBE in text else None

    def _renders_role(self, role: str) -> bool:
        """Return whether the template renders messages with a custom role. Many templates silently leave them out."""
        if not _CUSTOM_ROLE.fullmatch(role) or role == "function":
            return False
        if role not in self._custom_roles:
            if len(self._custom_roles) >= MAX_CUSTOM_ROLES:
                self._custom_roles.clear()
            self._custom_roles[role] = self._probe_role(role)
        return self._custom_roles[role]

    def _probe_role(self, role: str) -> bool:
        """Return whether the template renders messages with this role."""
        content: Any = [{"type": "text", "text": _PROBE}] if self.content_style == "parts" else _PROBE
        other: Any = [{"type": "text", "text": "a"}] if self.content_style == "parts" else "a"
        return _PROBE in (self._try_render([{"role": role, "content": content}, {"role": "user", "content": other}]) or "")

    def _probe_empty_content(self) -> dict[str, str]:
        """Return the content field of an assistant's message that has tool calls only.

        Most templates expect no content. An empty text is for those that fail without content (ChatML, and templates without tools).
        """
        fails_without = not any(self._render_tool_call(arguments, {}) for arguments in _PROBE_ARGUMENTS)
        return (
            {"content": ""}
            if fails_without and any(self._render_tool_call(arguments, {"content": ""}) for arguments in _PROBE_ARGUMENTS)
            else {}
        )

    def _probe_arguments(self) -> bool:
        """Return whether the template reads a call's arguments as an object (Qwen's, Llama's), not as JSON text (DeepSeek's)."""
        as_object = self._probe_call(_PROBE_ARGUMENTS[0])
        if as_object is not None and f"'{_PROBE}'" not in as_object:
            return True
        return self._probe_call(_PROBE_ARGUMENTS[1]) is None

    def _probe_call(self, arguments: Any) -> str | None:
        text = self._render_tool_call(arguments, self._empty_content)
        return text if text and _PROBE in text else None

    def _render_tool_call(self, arguments: Any, empty_content: dict[str, str]) -> str | None:
        """Render a question and a tool call with `arguments`. Return None if the template fails."""
        function = {"name": "probe", "arguments": arguments}
        call = {"id": "probe0000", "type": "function", "function": function}
        question = {"role": "user", "content": [{"type": "text", "text": "a"}] if self.content_style == "parts" else "a"}
        return self._try_render([question, {"role": "assistant", "tool_calls": [call], **empty_content}])

    def _try_render(self, messages: list[dict[str, Any]]) -> str | None:
        """Return the rendered messages, or None if the template refuses them."""
        variables = {**self._special_tokens, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render(messages, False, variables)
        except PromptError:
            return None


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, dict):
        raise PromptError(where, f"must be an object with type and text, not {json_type(part)}")
    if part.get("type") != "text":
        raise PromptError(f"{where}.type", f"is {quote(part.get('type'))}: this model reads text only")
    if not isinstance(part.get("text"), str):
        raise PromptError(f"{where}.text", f"must be a string, not {json_type(part.get('text'))}")
    text: str = part["text"]
    return text


class _ArgumentBudget:
    """Bound on the JSON in the strings of all tool calls of a request, which its own size does not count."""

    def __init__(self) -> None:
        self._left = MAX_OBJECTS

    def spend(self, size: JsonSize) -> None:
        """Raise PromptError once the strings have too many objects together."""
        self._left -= size.objects
        if self._left < 0:
            reason = f"the arguments of the tool calls have more than {MAX_OBJECTS} JSON objects, lists and keys: send fewer"
            raise PromptError("messages", reason)


def _tool_calls(calls: Any, where: str, takes_object_arguments: bool, budget: _ArgumentBudget) -> list[Any]:
    """Validate tool calls and convert their arguments. OpenAI sends a JSON string; most templates expect the object in it."""
    if not isinstance(calls, list):
        raise PromptError(where, f"must be a list, not {json_type(calls)}")
    normal = []
    for at, call in enumerate(calls):
        if not isinstance(call, dict):
            raise PromptError(f"{where}[{at}]", f"must be an object, not {json_type(call)}")
        function = call.get("function")
        if isinstance(function, dict):
            given = function.get("arguments")
            if isinstance(given, str) and takes_object_arguments:
                call = {**call, "function": {**function, "arguments": _arguments(given, budget)}}
            elif isinstance(given, dict) and not takes_object_arguments:
                call = {**call, "function": {**function, "arguments": json.dumps(given, ensure_ascii=False)}}
        normal.append(call)
    return normal


def _arguments(text: str, budget: _ArgumentBudget) -> Any:
    try:
        budget.spend(check_json(text.encode(errors="replace")))
        value = json.loads(text) if text.strip() else {}
    except PromptError:
        raise
    except (ValueError, RecursionError):
        return text  # a model may have written invalid JSON; the template shows it unchanged
    return value if isinstance(value, dict) else text


def _check_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise PromptError("tools", f"must be a list, not {json_type(tools)}")
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise PromptError(f"tools[{at}]", f"must be an object, not {json_type(tool)}")
    return tools


def json_type(value: Any) -> str:
    """Return the name of a JSON value's type for error messages."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
