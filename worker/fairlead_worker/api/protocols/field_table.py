"""Notes on the fields of the Responses and Messages APIs, for `GET /openapi.json` and for the pages that docs/generate/api.py writes."""

from typing import Any

import msgspec

from fairlead_common.protocols import messages, responses
from fairlead_common.protocols.paths import MESSAGES, RESPONSES

BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, str], dict[str, tuple[Any, ...]]]] = {
    RESPONSES: (responses.ResponsesBody, responses.REFUSED, responses.ALLOWED),
    MESSAGES: (messages.MessagesBody, {}, {}),
}
"""(body, why fields are refused, the only values of fields)."""
NOTES: dict[str, dict[str, str]] = {
    RESPONSES: {
        "include": f"`{responses.LOGPROBS}`; `reasoning.encrypted_content` adds nothing, because reasoning is plain text; others are "
        "left out",
        "client_metadata": "accepted without effect",
        "context_management": "left out: nothing of a conversation is compacted",
        "input": "a text, or items: messages with text, calls and their outputs, `reasoning`, `additional_tools`; others are text or "
        "left out",
        "instructions": "the first system message; developer messages at the start are merged into it, later ones are system messages",
        "max_output_tokens": "default: up to the end of the context",
        "max_tool_calls": "limits built-in tools, which do not exist here",
        "metadata": "returned unchanged",
        "model": "same as in chat completions",
        "parallel_tool_calls": "same as in chat completions",
        "prompt_cache_key": "returned unchanged; prefixes are cached for all users of a tenant",
        "prompt_cache_options": "accepted without effect, except `prewarm: true`, which is refused",
        "prompt_cache_retention": "returned unchanged; the cache keeps what is used",
        "reasoning": "`effort` (same as `reasoning_effort` of chat completions), `summary` (no summary is made), `mode: standard`, "
        "`context: auto`; others are left out",
        "safety_identifier": "returned unchanged",
        "service_tier": "accepted without effect; there is one tier",
        "stop": "same as in chat completions",
        "stream": "typed events, each with its name and number",
        "stream_options": "`include_obfuscation: true` is left out",
        "store": "true keeps the response if there is Redis; default: false",
        "text": "`format`: `text`, `json_object` or `json_schema`; `verbosity` has no effect",
        "tool_choice": "`none`, `auto`, `required`, a function, a custom tool, or `allowed_tools`",
        "tools": "functions, `custom`, `namespace`, `local_shell`, `tool_search` of the client; tools that run at OpenAI are left out",
        "top_logprobs": "works without `include` too",
        "user": "same as in chat completions; returned unchanged",
    },
    MESSAGES: {
        **{name: f"left out: {reason}" for name, reason in messages.LEFT_OUT.items()},
        **{name: f"accepted without effect: {reason}" for name, reason in messages.HINTS.items()},
        "cache_control": "here and in blocks; accepted without effect, because every prefix is cached",
        "max_tokens": "required, except for `count_tokens`",
        "messages": "text, `thinking`, `tool_use`, `tool_result` (`is_error` adds `Error:` in front), documents of text, system messages; "
        "others are text or left out; a last assistant message is continued",
        "metadata": "`user_id`: same as `user` of chat completions, of any length",
        "model": "same as in chat completions",
        "output_config": "`format`: a JSON schema; `effort`: same as `reasoning_effort` of chat completions",
        "output_format": "same as `output_config.format`",
        "service_tier": "accepted without effect; there is one tier",
        "stop_sequences": "at most 16; the answer names the one that matched",
        "stream": "named events",
        "system": "a text or text blocks",
        "thinking": "`enabled` (`budget_tokens` is passed to the template, and enforced as `thinking_token_budget`), "
        "`adaptive`, `between_tools` or `disabled`; "
        "`display: omitted` returns empty blocks; default: the model's own; signatures are empty",
        "tool_choice": "`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`",
        "tools": "with `input_schema`; Anthropic's `bash`, `memory` and `text_editor` of 2025-04 and later; others are left out",
    },
}
