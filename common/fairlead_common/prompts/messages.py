"""Validate and normalize clients' chat messages for a template. Errors name the fields of the request."""

import re
from typing import Any

from fairlead_common.errors import PromptError
from fairlead_common.prompts.bounded_template import bound_steps
from fairlead_common.prompts.call_history import ArgumentBudget, complete_calls, normalize_calls, short_id, write_call
from fairlead_common.prompts.chat_template import REASONING_FIELDS, ChatTemplate
from fairlead_common.prompts.content_parts import json_type, read_texts, replace_media, split_thoughts
from fairlead_common.prompts.template_probe import MessageForms, find_forms, probe_role
from fairlead_common.prompts.turn_order import answer_open_calls, arrange, parts_in_style, text_in_style
from fairlead_common.truncate import quote

ROLES = ("system", "developer", "user", "assistant", "tool")
_CUSTOM_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
"""A custom role is text in the prompt, so it must not contain markup of a template."""
MAX_CUSTOM_ROLES = 64
"""Custom roles whose support is remembered."""
PROBE_STEPS = 500_000
"""Passes of loops in all renderings of a probe. Real templates need a few thousand."""
_PROBE_TOOLS = [{"type": "function", "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}}]
_ABSENT: tuple[Any, ...] = (None, [])
"""Values of optional fields that mean the same as no field. Templates ask only whether the field is there."""


def check_template(source: str) -> None:
    """Raise PromptError for the field `chat_template` if a template does not compile, or does not end."""
    renderer = ChatRenderer(source, {})
    for with_tools in (False, True):
        renderer.forms(with_tools)


class ChatRenderer:
    """A template with its special tokens. Probes find the forms of messages that the template reads, with tools and without."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = ChatTemplate(source)
        self._special_tokens = special_tokens
        self._forms: dict[bool, MessageForms] = {}
        self._custom_roles: dict[str, bool] = {}

    def forms(self, with_tools: bool) -> MessageForms:
        """Return the forms that the template reads in requests with tools, or without. Raises PromptError if the template does not end."""
        if with_tools not in self._forms:
            with bound_steps(PROBE_STEPS):
                self._forms[with_tools] = find_forms(lambda messages: self._try_render(messages, with_tools))
        return self._forms[with_tools]

    def render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, continue_final_message: bool, template_kwargs: dict[str, Any]
    ) -> str:
        """Return the prompt text, equal to transformers' `apply_chat_template` for the same arguments."""
        if continue_final_message and add_generation_prompt:
            raise PromptError("continue_final_message", "cannot be combined with add_generation_prompt")
        if not isinstance(template_kwargs, dict):
            raise PromptError("chat_template_kwargs", f"must be an object, not {json_type(template_kwargs)}")
        tools = _check_tools(tools)
        variables = {
            **self._special_tokens,
            "documents": None,
            **template_kwargs,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        normal = self._normalize(messages, self.forms(tools is not None), continue_final_message)
        return self._template.render(normal, continue_final_message, variables)

    def _normalize(self, messages: Any, forms: MessageForms, continue_final_message: bool) -> list[dict[str, Any]]:
        if not isinstance(messages, list):
            raise PromptError("messages", f"must be a list of messages, not {json_type(messages)}")
        if not messages:
            raise PromptError("messages", "is empty: give at least one message")
        budget = ArgumentBudget()
        asked = [at for at, message in enumerate(messages) if isinstance(message, dict) and message.get("role") == "user"]
        last_question = asked[-1] if asked else 0
        normal = []
        for at, message in enumerate(complete_calls(messages, forms.names_results)):
            is_old = isinstance(message, dict) and (message.get("role") == "tool" or at < last_question)
            message = {**message, "content": replace_media(message.get("content"))} if is_old else message
            normal += self._normalize_message(message, f"messages[{at}]", forms, budget)
        if continue_final_message:
            normal = answer_open_calls(normal, forms.order, forms.fillers)
        arranged = arrange(normal, forms.order, forms.fillers)
        return [_with_thinking_part(message) for message in arranged] if forms.reads_thinking_parts else arranged

    def _normalize_message(self, message: Any, where: str, forms: MessageForms, budget: ArgumentBudget) -> list[dict[str, Any]]:
        """Return the message in the template's form: several messages where the template reads one call, or no text beside a call."""
        if not isinstance(message, dict):
            raise PromptError(where, f"must be an object with role and content, not {json_type(message)}")
        role = message.get("role")
        if not isinstance(role, str):
            raise PromptError(f"{where}.role", "must be a string, such as 'user'")
        if role not in ROLES and not self._renders_role(role, forms):
            reason = f"is {quote(role)}, which the chat template does not render; it must be one of {', '.join(ROLES)}"
            raise PromptError(f"{where}.role", reason)
        # Clients send `content: null` and `tool_calls: []`; templates expect the key to be missing then.
        normal = {key: value for key, value in message.items() if value or key == "content" or value not in _ABSENT}
        if role == "assistant":
            for name in REASONING_FIELDS:
                if name in normal:
                    normal[name] = "\n".join(read_texts(normal[name], f"{where}.{name}"))
        content = normal.pop("content", None)
        if role == "assistant":
            if isinstance(content, list):
                content, thought = split_thoughts(content, f"{where}.content")
                if thought and not any(name in normal for name in REASONING_FIELDS):
                    normal["reasoning_content"] = thought
            if content is None and isinstance(normal.get("refusal"), str):
                content = normal["refusal"]
            return _assistant_messages(normal, content, where, forms, budget)
        if content is None and role != "tool":  # a tool may return nothing
            raise PromptError(f"{where}.content", "is missing")
        content = "" if content is None else content
        normal.pop("tool_calls", None)
        if role == "tool":
            if forms.short_ids and isinstance(normal.get("tool_call_id"), str):
                normal["tool_call_id"] = short_id(normal["tool_call_id"])
            if forms.fillers.empty_result and not any(map(str.strip, read_texts(content, f"{where}.content"))):
                content = forms.fillers.empty_result
        return [{**normal, "content": _content(content, f"{where}.content", role, forms)}]

    def _renders_role(self, role: str, forms: MessageForms) -> bool:
        """Return whether the template renders messages with a custom role."""
        if not _CUSTOM_ROLE.fullmatch(role):
            return False
        if role not in self._custom_roles:
            if len(self._custom_roles) >= MAX_CUSTOM_ROLES:
                self._custom_roles.clear()
            self._custom_roles[role] = probe_role(lambda messages: self._try_render(messages, False), role, forms.fillers.styles["user"])
        return self._custom_roles[role]

    def _try_render(self, messages: list[dict[str, Any]], with_tools: bool) -> str | None:
        """Return the rendered messages, or None if the template refuses them. Raises PromptError if it does not end."""
        tools = _PROBE_TOOLS if with_tools else None
        variables = {**self._special_tokens, "tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            return self._template.render(messages, False, variables)
        except PromptError as error:
            if error.field == "chat_template":
                raise
            return None


def _assistant_messages(
    message: dict[str, Any], content: Any, where: str, forms: MessageForms, budget: ArgumentBudget
) -> list[dict[str, Any]]:
    if "tool_calls" not in message and isinstance(content, str) and content.strip():
        return [{**message, "content": text_in_style(content, forms.fillers.styles["assistant"])}]
    texts = [] if content is None else read_texts(content, f"{where}.content")
    is_empty = not any(text.strip() for text in texts)
    if "tool_calls" not in message:
        return [{**message, **(forms.without_calls if is_empty else {"content": _content(content, "", "assistant", forms)})}]
    calls = normalize_calls(message["tool_calls"], f"{where}.tool_calls", forms.arguments, budget)
    if forms.short_ids:
        calls = [{**call, "id": short_id(call["id"])} if isinstance(call.get("id"), str) else call for call in calls]
    if not forms.keeps_calls:
        del message["tool_calls"]
        return [{**message, "content": parts_in_style([*filter(None, texts), *map(write_call, calls)], forms.fillers.styles["assistant"])}]
    message, before = {**message, "tool_calls": calls}, []
    if not any(texts):
        message |= forms.fillers.beside_calls if content is None else forms.beside_calls_if_empty
    elif not forms.splits_text[any(name in message for name in REASONING_FIELDS)]:
        message["content"] = _content(content, "", "assistant", forms)
    else:
        before = [] if is_empty else [{"role": "assistant", "content": _content(content, "", "assistant", forms)}]
        message |= forms.fillers.beside_calls
    return [*before, message]


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning as the first part of its content."""
    thought = next((message[name] for name in REASONING_FIELDS if name in message), None)
    if thought is None:
        return message
    content = message.get("content")
    content = [] if content is None else content
    parts = text_in_style(content, "parts") if isinstance(content, str) else content
    return {**message, "content": [{"type": "thinking", "thinking": thought}, *parts]}


def _content(content: Any, where: str, role: str, forms: MessageForms) -> Any:
    """Return the content as a string or as parts, in the style that the template reads for the role."""
    style = forms.fillers.styles[role] if role in forms.fillers.styles else forms.fillers.styles["user"]
    if isinstance(content, str):
        return text_in_style(content, style)
    return parts_in_style(read_texts(content, where) or [""], style)


def _check_tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise PromptError("tools", f"must be a list, not {json_type(tools)}")
    for at, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise PromptError(f"tools[{at}]", f"must be an object, not {json_type(tool)}")
    return tools
