"""Anthropic's Messages: converted to chat completions. https://docs.anthropic.com/en/api/messages"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead_common.prompts.content_parts import json_type
from fairlead_common.protocols.fields import (
    SHARED_FIELDS,
    ChatBuilder,
    SharedFields,
    check_text,
    iterate_objects,
    join_texts,
    refuse,
    refuse_fields,
    refuse_values,
    require_text,
)

REFUSED = {
    "container": "there are no containers here; leave it out",
    "mcp_servers": "no tools run here; give tools with an input_schema",
    "context_management": "nothing of a conversation is edited here; send what is to be seen in messages",
    "diagnostics": "not supported; leave it out",
    "inference_geo": "not supported: the answer is computed where the service runs; leave it out",
    "user_profile_id": "there are no profiles here; leave it out",
    "workspace_id": "there are no workspaces here; leave it out",
}
"""Unsupported fields that would change the response. Null and false count as absent."""
ALLOWED: dict[str, tuple[Any, ...]] = {"speed": ("standard",)}
"""Fields of which only these values are supported."""
RENAMED = {
    r"\bmax_completion_tokens\b": "max_tokens",
    r"\bresponse_format\.json_schema\.schema\b": "output_config.format.schema",
    r"\bresponse_format(\.json_schema)?\b": "output_config.format",
    r"\breasoning_effort\b": "output_config.effort",
    r"\bthinking_token_budget\b": "thinking.budget_tokens",
    r"^stop\b": "stop_sequences",
    r"^user\b": "metadata.user_id",
    r"\.function\.parameters\b": ".input_schema",
    r"\.function\.": ".",
}
"""Chat fields with another name here, for errors: patterns, applied in this order."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesBody(SharedFields, frozen=True, kw_only=True):
    """The request body, with the fields shared with chats."""

    messages: list[Any] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    model: str | None = None
    system: str | list[Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


def chat_body(body: MessagesBody) -> dict[str, Any]:
    """Return the equivalent chat completion. Raises PromptError with the field's name as the client wrote it."""
    given = msgspec.structs.asdict(body)
    refuse_fields(given, REFUSED)
    refuse_values(given, ALLOWED)
    chat: dict[str, Any] = {name: given[name] for name in (*SHARED_FIELDS, "model", "temperature", "top_p", "stream")}
    chat["messages"], continues = _messages(body)
    if continues:
        chat["continue_final_message"] = True
    chat["max_completion_tokens"] = body.max_tokens
    chat["stop"] = body.stop_sequences
    chat["tools"] = [_tool(where, tool) for where, tool in iterate_objects(body.tools, "tools")] if body.tools else None
    chat["tool_choice"], chat["parallel_tool_calls"] = _choice(body.tool_choice)
    chat["response_format"] = _format((body.output_config or {}).get("format"))
    chat["reasoning_effort"] = _effort(body)
    chat["chat_template_kwargs"] = _template_kwargs(body)
    if (body.thinking or {}).get("type") == "enabled":
        chat["thinking_token_budget"] = (body.thinking or {}).get("budget_tokens")
    user = (body.metadata or {}).get("user_id")
    chat["user"] = check_text(user, "metadata.user_id") if user is not None else None
    return {name: value for name, value in chat.items() if value is not None}


def hides_thinking(body: MessagesBody) -> bool:
    """Return whether thinking blocks are wanted without their text."""
    return (body.thinking or {}).get("display") == "omitted"


def _messages(body: MessagesBody) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages, and whether the response continues the last one."""
    chat, role = ChatBuilder(), ""
    if body.system:
        chat.add_message("system", _texts(body.system, "system"))
    if not body.messages:
        refuse("messages", "is empty; give at least one message" if body.messages == [] else "is missing; give a list of messages")
    for where, message in iterate_objects(body.messages, "messages"):
        role = message.get("role", "")
        content = message.get("content")
        if role == "assistant":
            chat.end_turn()
            _assistant(chat, content, f"{where}.content")
        elif role == "user":
            _user(chat, content, f"{where}.content")
        elif role == "system":
            chat.add_message("system", _texts(content, f"{where}.content"))
        else:
            refuse(f"{where}.role", f"is {role!r:.40}; it must be user, assistant or system")
    last = chat.messages[-1] if chat.messages else {}
    if role == "assistant" and "tool_calls" in last:
        refuse("messages", "the last one has a tool_use; its tool_result must follow")
    return chat.messages, role == last.get("role") == "assistant" and last.get("content") is not None


def _user(chat: ChatBuilder, content: Any, where: str) -> None:
    """Add tool results as messages of their own, before the user's text."""
    if isinstance(content, str):
        chat.add_message("user", content)
        return
    texts = []
    for at, block in iterate_objects(content, where):
        match block.get("type"):
            case "text":
                texts.append(require_text(block, "text", at))
            case "tool_result":
                chat.add_tool_result(require_text(block, "tool_use_id", at), _result(block, at))
            case kind:
                refuse(f"{at}.type", f"is {kind!r:.60}: this model reads text and tool_result blocks only")
    if texts:
        chat.add_message("user", join_texts(texts))
    elif not content:
        refuse(where, "is empty: give a text, or at least one block")


def _result(block: dict[str, Any], where: str) -> Any:
    """Return a tool result. Templates have no field for is_error, so the text states it."""
    content = _texts(block.get("content") or "", f"{where}.content")
    if block.get("is_error") is not True:
        return content
    return join_texts(["Error:", *(part["text"] for part in content)]) if isinstance(content, list) else f"Error: {content}"


def _assistant(chat: ChatBuilder, content: Any, where: str) -> None:
    if isinstance(content, str):
        chat.add_answer(content)
        return
    texts = []
    for at, block in iterate_objects(content, where):
        match block.get("type"):
            case "text":
                texts.append(require_text(block, "text", at))
            case "thinking":
                chat.add_reasoning(check_text(block.get("thinking"), f"{at}.thinking"))
            case "redacted_thinking":
                refuse(f"{at}.type", "only its issuer can decrypt it; leave the block out")
            case "tool_use":
                arguments = block.get("input")
                if not isinstance(arguments, dict):
                    refuse(f"{at}.input", f"must be an object, not {json_type(arguments)}")
                chat.add_tool_call(require_text(block, "id", at), require_text(block, "name", at), msgspec.json.encode(arguments).decode())
            case kind:
                refuse(f"{at}.type", f"is {kind!r:.60}: an assistant's blocks are text, thinking and tool_use here")
    if texts:
        chat.add_answer(join_texts(texts))


def _texts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    texts = []
    for at, block in iterate_objects(content, where):
        if block.get("type") != "text":
            refuse(f"{at}.type", f"is {block.get('type')!r:.60}: only text can stand here")
        texts.append(require_text(block, "text", at))
    return join_texts(texts)


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        refuse(f"{where}.type", f"{tool['type']!r:.60} runs elsewhere or has no schema; give tools with an input_schema")
    refuse_fields(tool, {"defer_loading": "not supported; leave it out"})
    name, schema = require_text(tool, "name", where), tool.get("input_schema")
    if not isinstance(schema, dict):
        refuse(f"{where}.input_schema", f"must be a JSON schema, not {json_type(schema)}")
    function = {"name": name, "parameters": schema}
    for field in ("description", "strict"):
        if tool.get(field) is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


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
            return refuse("tool_choice.type", f"is {kind!r:.60}; it must be auto, any, tool or none")


def _format(form: Any) -> dict[str, Any] | None:
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        refuse("output_config.format", 'must be an object of type "json_schema"')
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _effort(body: MessagesBody) -> str | None:
    """Return a chat's reasoning effort: "none" for disabled thinking."""
    if (body.thinking or {}).get("type") == "disabled":
        return "none"
    effort = (body.output_config or {}).get("effort")
    return None if effort is None else check_text(effort, "output_config.effort")


def _template_kwargs(body: MessagesBody) -> Any:
    """Return template variables for thinking: a switch, and a budget for templates that use one (Seed-OSS). The worker enforces it.

    The client's chat_template_kwargs take precedence.
    """
    wanted: dict[str, Any] = {}
    if body.thinking is not None:
        refuse_values(body.thinking, {"display": ("summarized", "omitted")}, "thinking.")
        match body.thinking.get("type"):
            case "enabled":
                budget = body.thinking.get("budget_tokens")
                if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                    refuse("thinking.budget_tokens", "must be a positive integer")
                wanted = {"enable_thinking": True, "thinking": True, "thinking_budget": budget}
            case "adaptive":
                wanted = {"enable_thinking": True, "thinking": True}
            case "disabled":
                pass
            case kind:
                refuse("thinking.type", f"is {kind!r:.60}; it must be enabled, disabled or adaptive")
    given = body.chat_template_kwargs
    return {**wanted, **given} if isinstance(given, dict) else wanted or given
