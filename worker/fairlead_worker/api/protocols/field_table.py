"""Tables of docs/reference/api.md for the fields of the other APIs."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from fairlead_common.protocols import messages, responses
from fairlead_common.protocols.fields import SHARED_FIELDS
from fairlead_common.protocols.paths import MESSAGES, RESPONSES

BODIES: dict[str, tuple[type[msgspec.Struct], Any]] = {
    RESPONSES: (responses.ResponsesBody, responses),
    MESSAGES: (messages.MessagesBody, messages),
}
NOTES: dict[str, dict[str, str]] = {
    RESPONSES: {
        "include": f"`{responses.LOGPROBS}`; `reasoning.encrypted_content`: nothing to add, as reasoning comes in plain text",
        "input": "a text, or items: messages with text, `function_call`, `function_call_output`, `reasoning`; refused: others",
        "instructions": "the first system message; developer messages are system messages, those in front one with it",
        "max_output_tokens": "left out: to the end of the context",
        "max_tool_calls": "limits built-in tools, which do not exist here",
        "metadata": "given back",
        "model": "as in chats",
        "parallel_tool_calls": "as in chats",
        "prompt_cache_key": "given back; prefixes are cached for all users of a tenant",
        "prompt_cache_options": "`mode` `implicit`; refused: others, `ttl`, `prewarm`",
        "reasoning": "`effort` as a chat's `reasoning_effort`; `summary` `auto`: none is made; `mode` `standard`; `context` `auto`; "
        "refused: others",
        "safety_identifier": "given back",
        "stop": "as in chats",
        "stream": "typed events, each with its name and number",
        "stream_options": "`include_obfuscation` false",
        "text": "`format`: `text`, `json_object` or `json_schema`, see [structured output](structured-output.md); `verbosity`: `medium`",
        "tool_choice": "`none`, `auto`, `required`, a function, or `allowed_tools`",
        "tools": "functions; refused: built-in tools, MCP, custom and namespace tools, `defer_loading`, `async`",
        "top_logprobs": "also without `include`",
        "user": "as in chats; given back",
    },
    MESSAGES: {
        "cache_control": "here and in blocks: every prefix is cached, marked or not",
        "max_tokens": "required, but for `count_tokens`",
        "messages": "text, `thinking`, `tool_use`, `tool_result` (text; `is_error` puts `Error:` before it), system messages; refused: "
        "others; a last message of the assistant is continued",
        "metadata": "`user_id`, as a chat's `user`",
        "model": "as in chats",
        "output_config": "`format`, see [structured output](structured-output.md); `effort` as a chat's `reasoning_effort`",
        "stop_sequences": "at most 16; the one that was met is named",
        "stream": "named events",
        "system": "a text or text blocks",
        "thinking": "`enabled` (`budget_tokens` is passed to the template and cuts nothing off), `adaptive`, `disabled`; `display` "
        "`omitted`: empty blocks; left out: as the model does by itself. Signatures are empty",
        "tool_choice": "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`",
        "tools": "with `input_schema`; refused: Anthropic's own tools, `defer_loading`",
    },
}
ALSO = {
    MESSAGES: "\n`POST /v1/messages/count_tokens` takes the same fields and answers `input_tokens`; nothing is generated. What would be "
    "refused is not counted, but for a prompt that is too long.\n"
}


def render(values: Callable[[dict[str, Any]], str]) -> str:
    """Return the sections. `values` describes the type and bounds of a field's schema."""
    return "".join(f"\n## POST {path}\n{_table(path, body, module, values)}{ALSO.get(path, '')}" for path, (body, module) in BODIES.items())


def _table(path: str, body: type[msgspec.Struct], module: Any, values: Callable[[dict[str, Any]], str]) -> str:
    properties: dict[str, Any] = msgspec.json.schema(body)["$defs"][body.__name__]["properties"]
    rows = ["| field | | values |", "| --- | --- | --- |"]
    for name in sorted(properties):
        kind, description = _classify(name, module.REFUSED, module.ALLOWED)
        note = NOTES[path].get(name)
        if not description:
            own = _describe_values(properties[name], values)
            description = "as in chats" if name in SHARED_FIELDS else "; ".join(filter(None, (own, note)))
        rows.append(f"| `{name}` | {kind} | {description} |")
    return "\n".join(rows) + "\n"


def _describe_values(node: dict[str, Any], values: Callable[[dict[str, Any]], str]) -> str:
    """Describe a field's values. Fields that the chat's rules check have no description of their own."""
    return values(node) if node.keys() & {"type", "anyOf"} else ""


def _classify(name: str, refused: Mapping[str, str], allowed: Mapping[str, tuple[Any, ...]]) -> tuple[str, str]:
    if name in refused:
        return "refused", refused[name]
    if name in allowed:
        return "refused in part", " or ".join(f"`{value}`" for value in allowed[name]) + "; refused: others"
    return "supported", ""
