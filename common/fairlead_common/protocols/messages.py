"""Anthropic's Messages: converted to chat completions. https://docs.anthropic.com/en/api/messages"""

from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead_common.protocols.chat_builder import ChatBuilder
from fairlead_common.protocols.conversion import Conversion, Omissions
from fairlead_common.protocols.fields import ABSENT, SHARED_FIELDS, SharedFields, check_text, iterate_objects, refuse
from fairlead_common.protocols.message_blocks import BlockReader
from fairlead_common.protocols.message_tools import read_tools
from fairlead_common.truncate import quote

LEFT_OUT = {
    "compaction": "nothing of a conversation is compacted",
    "container": "there are no containers",
    "context_management": "nothing of a conversation is cleared: what is in messages is in the prompt",
    "fallbacks": "there is no other model to fall back to",
    "inference_geo": "the answer is computed where the service runs",
    "mcp_servers": "no tools run at the service",
}
"""Fields without effect that the response's warning names. Null, false and empty values count as absent."""
HINTS = {
    "betas": "what is served needs none",
    "billing_policy": "there are no bills",
    "diagnostics": "none are returned",
    "fallback_credit_token": "there are no credits",
    "speed": "there is one speed",
    "thread": "the conversation is what is in messages",
    "user_profile_id": "there are no profiles",
    "workspace_id": "there are no workspaces",
}
"""Fields without effect on the answer."""
INTERRUPTED = "No result: the call was interrupted."
"""The result of a call at the end of the conversation."""
MAX_USER = 256
"""Characters of a chat's user."""
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
    output_format: dict[str, Any] | None = None
    betas: Any = None
    billing_policy: Any = None
    compaction: Any = None
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    speed: Any = None
    thread: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


def convert(body: MessagesBody) -> Conversion:
    """Return the equivalent chat completion. Raises PromptError with the field's name as the client wrote it."""
    given, omissions = msgspec.structs.asdict(body), Omissions()
    for field in LEFT_OUT:
        if given[field] not in (*ABSENT, {"edits": []}):
            omissions.leave_out(field)
    chat: dict[str, Any] = {name: given[name] for name in (*SHARED_FIELDS, "model", "temperature", "top_p", "stream")}
    chat["messages"], continues = _messages(body, omissions)
    if continues:
        chat["continue_final_message"] = True
    chat["max_completion_tokens"] = body.max_tokens
    chat["stop"] = body.stop_sequences
    tools, tool_fields = read_tools(body.tools, body.tool_choice, omissions)
    chat |= tools
    chat["response_format"] = _format((body.output_config or {}).get("format") or body.output_format)
    chat["reasoning_effort"] = _effort(body)
    chat["chat_template_kwargs"] = _template_kwargs(body)
    if (body.thinking or {}).get("type") == "enabled":
        chat["thinking_token_budget"] = (body.thinking or {}).get("budget_tokens")
    chat["user"] = _user(body.metadata or {})
    return Conversion({name: value for name, value in chat.items() if value is not None}, omissions, tool_fields)


def hides_thinking(body: MessagesBody) -> bool:
    """Return whether thinking blocks are wanted without their text."""
    return (body.thinking or {}).get("display") == "omitted"


def _messages(body: MessagesBody, omissions: Omissions) -> tuple[list[dict[str, Any]], bool]:
    """Return the messages, and whether the response continues the last one."""
    chat, role = ChatBuilder(), ""
    reader = BlockReader(chat, omissions)
    if body.system:
        reader.add_system(body.system, "system")
    if not body.messages:
        refuse("messages", "is empty; give at least one message" if body.messages == [] else "is missing; give a list of messages")
    messages = list(iterate_objects(body.messages, "messages"))
    last_question = max((at for at, (_, message) in enumerate(messages) if message.get("role") == "user"), default=None)
    for at, (where, message) in enumerate(messages):
        role, content, where = message.get("role", ""), message.get("content"), f"{where}.content"
        if role == "assistant":
            chat.end_turn()
            reader.add_assistant(content, where)
        elif role == "user":
            reader.add_user(content, where, at == last_question)
        elif role == "system":
            reader.add_system(content, where)
        else:
            refuse(f"messages[{at}].role", f"is {quote(role)}; it must be user, assistant or system")
    if role == "assistant":
        chat.answer_open_calls(INTERRUPTED)
    last = chat.messages[-1] if chat.messages else {}
    return chat.messages, role == last.get("role") == "assistant" and last.get("content") is not None


def _user(metadata: dict[str, Any]) -> str | None:
    """Return the user. A long id, such as the JSON that Claude Code sends, is replaced by its digest."""
    if metadata.get("user_id") is None:
        return None
    user = check_text(metadata["user_id"], "metadata.user_id")
    return user if len(user) <= MAX_USER else sha256(user.encode(errors="replace")).hexdigest()


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
        match body.thinking.get("type"):
            case "enabled":
                budget = body.thinking.get("budget_tokens")
                if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
                    refuse("thinking.budget_tokens", "must be a positive integer")
                wanted = {"enable_thinking": True, "thinking": True, "thinking_budget": budget}
            case "adaptive" | "between_tools":
                wanted = {"enable_thinking": True, "thinking": True}
            case "disabled":
                pass
            case kind:
                refuse("thinking.type", f"is {quote(kind)}; it must be enabled, disabled, adaptive or between_tools")
    given = body.chat_template_kwargs
    return {**wanted, **given} if isinstance(given, dict) else wanted or given
