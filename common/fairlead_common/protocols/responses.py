"""OpenAI's Responses: converted to chat completions. https://platform.openai.com/docs/api-reference/responses/create"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from fairlead_common.prompts.content_parts import json_type
from fairlead_common.protocols.chat_builder import ChatBuilder
from fairlead_common.protocols.conversion import Conversion, Omissions
from fairlead_common.protocols.fields import ABSENT, SHARED_FIELDS, SharedFields, check_text, refuse, refuse_fields, refuse_values
from fairlead_common.protocols.response_items import ItemReader
from fairlead_common.protocols.response_tools import ToolReader

LOGPROBS = "message.output_text.logprobs"
PREVIOUS = "previous_response_id"
"""A worker with stored responses replaces it by the conversation, before the conversion to a chat."""
REFUSED = {
    PREVIOUS: "needs stored responses: Redis, and --limits stored_responses above 0; or send the whole conversation in input",
    "conversation": "no conversations are stored here; send the whole one in input",
    "background": "not supported: an answer belongs to its connection; leave it out",
    "background_options": "not supported, as background is not; leave it out",
    "prompt": "there are no stored prompts here; send the text in instructions and input",
    "moderation": "not supported; leave it out",
    "access_programs": "not supported; leave it out",
    "image": "not supported: this model reads and writes text only",
}
"""Unsupported fields that would change the response. Null and false count as absent."""
ALLOWED: dict[str, tuple[Any, ...]] = {"truncation": ("disabled", "auto")}
"""Fields of which only these values are supported. Nothing is truncated: a conversation beyond the context is refused."""
_REASONING = {"mode": (None, "standard"), "context": (None, "auto")}
"""Fields of `reasoning` with the values that have an effect. Summaries are never made: reasoning comes in plain text."""
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
    client_metadata: Any = None
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


def convert(body: ResponsesBody) -> Conversion:
    """Return the equivalent chat completion. Raises PromptError with the field's name as the client wrote it."""
    given, omissions = msgspec.structs.asdict(body), Omissions()
    refuse_fields(given, REFUSED)
    refuse_values(given, ALLOWED)
    refuse_values(body.prompt_cache_options or {}, {"prewarm": (False,)}, "prompt_cache_options.")
    _note_hints(body, omissions)
    chat: dict[str, Any] = {name: given[name] for name in (*SHARED_FIELDS, "model", "temperature", "top_p", "stop", "stream", "user")}
    tools = ToolReader(omissions)
    tools.add(body.tools or [], "tools")
    chat["messages"] = _messages(body, tools, omissions)
    chat["tools"], chat["tool_choice"] = tools.tools or None, tools.choose(body.tool_choice)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    chat["response_format"] = _format(body.text or {})
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        chat["logprobs"], chat["top_logprobs"] = True, body.top_logprobs or 0
    effort = (body.reasoning or {}).get("effort")
    chat["reasoning_effort"] = None if effort is None else check_text(effort, "reasoning.effort")
    return Conversion({name: value for name, value in chat.items() if value is not None}, omissions, tools.fields, tools.offered)


def _messages(body: ResponsesBody, tools: ToolReader, omissions: Omissions) -> list[dict[str, Any]]:
    chat = ChatBuilder()
    if body.instructions:
        chat.add_message("system", body.instructions)
    if not body.input:
        refuse("input", f"is {'missing' if body.input is None else 'empty'}; give a text or a list of items")
    if isinstance(body.input, str):
        chat.add_message("user", body.input)
    else:
        ItemReader(chat, tools, omissions).add(body.input)
    return chat.messages


def _note_hints(body: ResponsesBody, omissions: Omissions) -> None:
    """Note hints that cannot be followed."""
    if body.context_management not in ABSENT:
        omissions.leave_out("context_management")
    for at, include in enumerate(body.include or ()):
        if include not in INCLUDES:
            omissions.leave_out(f"include[{at}]")
    for field, value in (body.reasoning or {}).items():
        if field in _REASONING and value not in _REASONING[field]:
            omissions.leave_out(f"reasoning.{field}")
    if (body.stream_options or {}).get("include_obfuscation") not in ABSENT:
        omissions.leave_out("stream_options.include_obfuscation")


def _format(given: dict[str, Any]) -> dict[str, Any] | None:
    form = given.get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        refuse("text.format", f"must be an object, not {json_type(form)}")
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
