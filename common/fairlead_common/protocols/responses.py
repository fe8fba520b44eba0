"""OpenAI's Responses: converted to chat completions. https://platform.openai.com/docs/api-reference/responses/create"""

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

LOGPROBS = "message.output_text.logprobs"
NOT_STORED = "nothing is stored here; send the whole conversation in input"
PREVIOUS = "previous_response_id"
"""A worker with stored responses replaces it by the conversation, before the conversion to a chat."""
REFUSED = {
    PREVIOUS: "needs stored responses: Redis, and --limits stored_responses above 0; or send the whole conversation in input",
    "conversation": NOT_STORED,
    "background": "not supported: an answer belongs to its connection; leave it out",
    "background_options": "not supported, as background is not; leave it out",
    "prompt": "there are no stored prompts here; send the text in instructions and input",
    "context_management": "nothing is compacted here; send what is to be seen in input",
    "moderation": "not supported; leave it out",
    "access_programs": "not supported; leave it out",
    "image": "not supported: this model reads and writes text only",
}
"""Unsupported fields that would change the response. Null and false count as absent."""
ALLOWED: dict[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
}
"""Fields of which only these values are supported."""
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Reasoning comes in plain text, so its encrypted form has nothing to add and is left out."""
RENAMED = {
    r"\bmax_completion_tokens\b": "max_output_tokens",
    r"\bresponse_format\.json_schema\.schema\b": "text.format.schema",
    r"\bresponse_format(\.json_schema)?\b": "text.format",
    r"\breasoning_effort\b": "reasoning.effort",
    r"^messages\b": "input",
    r"\btool_choice\.allowed_tools\b": "tool_choice",
    r"\.function\.": ".",
}
"""Chat fields with another name here, for errors: patterns, applied in this order."""


class ResponsesBody(SharedFields, frozen=True, kw_only=True):
    """The request body, with the fields shared with chats."""

    input: str | list[Any] | None = None
    instructions: str | None = None
    model: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    truncation: str | None = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    background_options: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    access_programs: Any = None
    image: Any = None
    stop: Any = None


def chat_body(body: ResponsesBody) -> dict[str, Any]:
    """Return the equivalent chat completion. Raises PromptError with the field's name as the client wrote it."""
    given = msgspec.structs.asdict(body)
    refuse_fields(given, REFUSED)
    refuse_values(given, ALLOWED)
    refuse_values(body.stream_options or {}, {"include_obfuscation": (False,)}, "stream_options.")
    refuse_values(body.prompt_cache_options or {}, {"prewarm": (False,)}, "prompt_cache_options.")
    for at, include in enumerate(body.include or ()):
        if include not in INCLUDES:
            refuse(f"include[{at}]", f"{include!r:.80} is not supported; give {' and '.join(INCLUDES)}")
    chat: dict[str, Any] = {name: given[name] for name in (*SHARED_FIELDS, "model", "temperature", "top_p", "stop", "stream", "user")}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["tools"], chat["tool_choice"] = _tools(body)
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    chat["response_format"] = _format(body.text or {})
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat["logprobs"], chat["top_logprobs"] = True, body.top_logprobs or 0
    chat["reasoning_effort"] = _effort(body.reasoning or {})
    return {name: value for name, value in chat.items() if value is not None}


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    chat = ChatBuilder()
    if body.instructions:
        chat.add_message("system", body.instructions)
    if not body.input:
        refuse("input", f"is {'missing' if body.input is None else 'empty'}; give a text or a list of items")
    if isinstance(body.input, str):
        chat.add_message("user", body.input)
        return chat.messages
    for where, item in iterate_objects(body.input, "input"):
        _item(chat, where, item)
    return chat.messages


def _item(chat: ChatBuilder, where: str, item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
            if role == "assistant":
                chat.add_answer(content)
            elif role in ("user", "system", "developer"):
                chat.add_message("system" if role == "developer" else role, content)
            else:
                refuse(f"{where}.role", f"is {role!r:.40}; it must be user, assistant, system or developer")
        case "function_call":
            chat.add_tool_call(
                require_text(item, "call_id", where), require_text(item, "name", where), require_text(item, "arguments", where)
            )
        case "function_call_output":
            chat.add_tool_result(require_text(item, "call_id", where), _content(item.get("output"), f"{where}.output"))
        case "reasoning":
            if reasoning := _reasoning_text(where, item):
                chat.add_reasoning(reasoning)
        case "item_reference":
            refuse(where, NOT_STORED)
        case kind:
            refuse(
                f"{where}.type", f"{kind!r:.60} is of a built-in tool or a stored state; there are messages, functions and reasoning here"
            )


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, f"must be a string or a list of parts, not {json_type(content)}")
    texts = []
    for at, part in iterate_objects(content, where):
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            refuse(f"{at}.type", f"is {kind!r:.60}: this model reads text only")
        texts.append(require_text(part, "refusal" if kind == "refusal" else "text", at))
    return join_texts(texts)


def _reasoning_text(where: str, item: dict[str, Any]) -> str:
    """Return the reasoning's text, or its summary if it has no text."""
    for field, separator in (("content", ""), ("summary", "\n\n")):
        parts = iterate_objects(item.get(field) or [], f"{where}.{field}")
        if reasoning := separator.join(require_text(part, "text", at) for at, part in parts):
            return reasoning
    if item.get("encrypted_content"):
        refuse(f"{where}.encrypted_content", "only its issuer can decrypt it; leave the item out")
    return ""


def _tools(body: ResponsesBody) -> tuple[list[dict[str, Any]] | None, Any]:
    tools = [_tool(where, tool) for where, tool in iterate_objects(body.tools, "tools")] if body.tools else None
    choice = body.tool_choice
    if not isinstance(choice, dict):
        return tools, choice
    match choice.get("type"):
        case "function":
            return tools, {"type": "function", "function": {"name": require_text(choice, "name", "tool_choice")}}
        case "allowed_tools":
            mode = choice.get("mode", "auto")
            if mode not in ("auto", "required"):
                refuse("tool_choice.mode", f"is {mode!r:.40}; it must be auto or required")
            listed = iterate_objects(choice.get("tools"), "tool_choice.tools")
            allowed = [{"type": "function", "function": {"name": require_text(tool, "name", where)}} for where, tool in listed]
            return tools, {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
        case kind:
            return refuse("tool_choice.type", f"{kind!r:.60} is not supported; give none, auto, required, a function or allowed_tools")


def _tool(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        refuse(f"{where}.type", f"{tool.get('type')!r:.60} is a tool that runs elsewhere or has no schema; this service has functions only")
    refuse_fields(tool, {"async": "not supported; leave it out", "defer_loading": "not supported; leave it out"})
    function = {name: tool[name] for name in ("description", "parameters", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {"name": require_text(tool, "name", where), **function}}


def _format(given: dict[str, Any]) -> dict[str, Any] | None:
    form = given.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        refuse("text.format", f"must be an object, not {json_type(form)}")
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


def _effort(given: dict[str, Any]) -> str | None:
    refuse_values(given, {"summary": ("auto",), "generate_summary": ("auto",), "mode": ("standard",), "context": ("auto",)}, "reasoning.")
    effort = given.get("effort")
    return None if effort is None else check_text(effort, "reasoning.effort")
