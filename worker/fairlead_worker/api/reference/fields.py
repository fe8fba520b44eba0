"""`python -m fairlead_worker.api.reference.fields [ROOT]`: write docs/reference/api.md, the support status of each request field."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fairlead_common.protocols.paths import EMBEDDINGS, RERANKS, SCORES
from fairlead_worker.api.generation.unsupported_fields import HINTS, REFUSALS, to_json
from fairlead_worker.api.pooling.schema import EmbeddingRequest, RerankRequest, ScoreRequest
from fairlead_worker.api.protocols import field_table as protocols
from fairlead_worker.api.schema import ChatRequest, CommonRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

PAGE = Path("docs/reference/api.md")
ENDPOINTS: dict[str, type[CommonRequest]] = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
REFUSED = {
    "stream_options": "`include_obfuscation` true",
}
"""Fields with some unsupported values that get a 400. Fields that are wholly unsupported are in `unsupported_fields.py`."""
OPENAI: dict[str, tuple[str, ...]] = {
    "/v1/completions": (),
    "/v1/chat/completions": (),
}
"""OpenAI fields that the worker does not know and ignores, like any other unknown name."""
NOTES = {
    "add_special_tokens": "the tokenizer's special tokens around the prompt",
    "allowed_token_ids": "not empty",
    "cache_salt": "prompts with different salts share no cached KV; as in vLLM",
    "bad_words": "1 to 128 characters each, not of spaces alone; if nothing else is possible, one may appear",
    "best_of": "at least `n`; above it not with `stream`",
    "chat_template": "replaces the model's, with `--trust-request-chat-template`; else refused",
    "chat_template_kwargs": "variables of the template; no `chat_template`",
    "documents": "for templates that read them",
    "guided_choice": "1 to 1024 strings; as `structured_outputs.choice`",
    "guided_grammar": "as `structured_outputs.grammar`",
    "guided_json": "a JSON schema, or one as a string; as `structured_outputs.json`",
    "guided_regex": "as `structured_outputs.regex`",
    "guided_whitespace_pattern": "as `structured_outputs.whitespace_pattern`",
    "include_stop_str_in_output": "also the text of a stop token, if it has one",
    "logit_bias": "token ids as keys, values from -100 to 100, at most 1024",
    "max_completion_tokens": "without it and `max_tokens`: to the end of the context",
    "min_tokens": "at most `max_tokens`",
    "model": "one of the served names, or a LoRA adapter's; left out: the first",
    "priority": "lower values run first, with `--policy priority`; no effect with other policies",
    "prompt": "at most 1024 sequences, with `n` or `best_of`",
    "prompt_logprobs": "not with `stream`",
    "request_id": "1 to 128 visible ASCII characters, the answer's `id` behind its prefix; left out: the X-Request-Id",
    "response_format": "`text`, `json_object`, `json_schema` or `structural_tag`; see [structured output](structured-output.md)",
    "return_token_ids": "`token_ids` in choices and chunks, `prompt_token_ids` in completions' choices and beside those of chats",
    "return_tokens_as_token_ids": "log-probabilities name tokens `token_id:7`; no effect on `prompt_logprobs`, which has ids and texts",
    "seed": "left out: random",
    "skip_special_tokens": "left out: true",
    "spaces_between_special_tokens": "false: refused for the few tokenizers that put spaces there, where `skip_special_tokens` is false",
    "stop": "at most 16; the text ends before the first; none may be empty",
    "stream_options": "only with `stream`: `include_usage`, `continuous_usage_stats`",
    "structured_outputs": "one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`, with `whitespace_pattern` or "
    "`disable_any_whitespace`; see [structured output](structured-output.md)",
    "include_reasoning": "false: reasoning is generated, counted and not shown; as in vLLM",
    "parallel_tool_calls": "false: the answer ends after its first call",
    "reasoning_effort": "a variable of the template; `none` also sets `enable_thinking` and `thinking` to false",
    "tool_choice": "`none`, `auto`, `required`, a function, or `allowed_tools`; see [tools](tools.md)",
    "tools": "functions, at most 512; see [tools](tools.md)",
    "truncate_prompt_tokens": "the prompt's last ones; -1: as many as leave room for `max_tokens`; 0 is refused",
    "user": "at most 256 characters; the owner of the fair share, with `--policy fair`; no effect with other policies",
    "top_logprobs": "only with `logprobs`",
}
OWN_NOTES: dict[str, dict[str, str]] = {
    "/v1/completions": {
        "add_special_tokens": "left out: true",
        "echo": "the prompt before the answer",
        "max_tokens": "left out: 16; 0 is for `echo` and `prompt_logprobs`",
    },
    "/v1/chat/completions": {
        "add_special_tokens": "left out: false, because templates write them",
        "echo": "the last message before the answer, if the answer continues it or has the same role",
        "max_tokens": "where `max_completion_tokens` is left out",
    },
}
VALUES = {
    "prompt": "a text, token ids, or an array of either",
    "messages": "array of OpenAI's messages, for the model's template; roles: system, developer (a system message if the template "
    "has no such role), user, assistant, tool; refused: others",
}
"""Texts for fields whose schema types would not read well."""
POOLED: dict[tuple[str, ...], type[msgspec.Struct]] = {(EMBEDDINGS,): EmbeddingRequest, SCORES: ScoreRequest, RERANKS: RerankRequest}
"""Requests that are answered from hidden states, by all their paths. Each of their fields has a note of its own."""
POOLED_NOTES = {
    "cache_salt": "as in completions",
    "dimensions": "the first values, of unit length again; only for models trained for it: `is_matryoshka` or `matryoshka_dimensions` in "
    "the model's config, or `--matryoshka`; else refused",
    "documents": "texts, or objects with a `text`; at most 2047",
    "encoding_format": "left out: `float`; `base64`: little-endian float32",
    "input": "a text, token ids, or an array of either, at most 2048; none empty or longer than the context",
    "model": "one of the served names, or a LoRA adapter's; left out: the first",
    "priority": "lower values run first, with `--policy priority`; no effect with other policies",
    "query": "a text",
    "return_documents": "left out: true",
    "text_1": "a text, or as many as `text_2`",
    "text_2": "a text, or an array of texts",
    "top_n": "left out: all",
    "truncate_prompt_tokens": "400",
    "user": "at most 256 characters; the owner of the fair share, with `--policy fair`; no effect with other policies",
}
TOKENS: dict[tuple[str, ...], type[msgspec.Struct]] = {("/tokenize",): TokenizeRequest, ("/detokenize",): DetokenizeRequest}
TOKEN_NOTES = {
    "add_generation_prompt": "left out: true; for messages",
    "add_special_tokens": "left out: true for a prompt, false for messages, because templates write them",
    "chat_template": "replaces the model's, with `--trust-request-chat-template`; else refused",
    "chat_template_kwargs": "variables of the template; no `chat_template`",
    "continue_final_message": "left out: false; the last message is left open",
    "messages": "as in chats; give either them or a `prompt`",
    "model": POOLED_NOTES["model"],
    "prompt": "a text; also one that is longer than the context",
    "return_token_strs": "left out: false; each token as the vocabulary writes it",
    "tokens": "required; token ids; ids outside the vocabulary are left out of the text",
    "tools": "as in chats",
}
_POOLED = """
Embeddings have unit length. They are the model's last hidden states, pooled as its files or `--pooling` define ([models](models.md)).
Scores are cosines of two embeddings. Such requests run in the same steps as generation and are counted like its prompts.
"""
_INTRO = """# API reference: request fields
Generated by `make api-docs` from `worker/fairlead_worker/api`; do not edit.

*Supported*: works as documented by OpenAI, or by vLLM for its own fields. *Refused*: 400 that names the field, because ignoring it would
change the answer.
*Refused in part*: only the listed values are accepted. *Accepted*: changes no answer and is not read. *Ignored*: unknown field.
A value out of bounds is refused. `null` means that the field is absent. A field in no table is ignored.
`GET /openapi.json` of workers and routers has the same content as an OpenAPI 3.1 document. [Limits](limits.md) lists bounds on requests.

## Streams
| | |
| --- | --- |
| first | nothing before the first token; then a chunk for each choice: its role (chats), its `echo`, its `prompt_token_ids` |
| text | whole characters only; text that may be the start of a stop string is held back until that is known |
| finish | one chunk for each choice, with no text, that has `finish_reason` and vLLM's `stop_reason` |
| usage | `stream_options.include_usage`: a chunk without choices after all others; `continuous_usage_stats`: in every chunk. |
| comments | lines that begin with a colon, which SSE clients ignore: `: usage …` before the end, through a router with keys |
| end | `data: [DONE]`; after an error, `data: {"error": …}` instead |
| client gone | its sequences are aborted before the engine's next step |
| client slow | the worker stops sending, and ends the request at a [limit](limits.md#work) |

Whole responses use the same code as streams; `make golden` compares them.
"""

_LORA = """
## POST /v1/load_lora_adapter, /v1/unload_lora_adapter
On a worker with `--allow-runtime-lora-updating`, not on the router ([LoRA](lora.md)); otherwise 403. The response is a line of text.
| field | | values |
| --- | --- | --- |
| `lora_name` | required | letters, digits and `._:/-`; 400 for the model's own name or a loaded adapter; to unload: 404 if unknown |
| `lora_path` | to load | URI or folder; 400 with the reason if it cannot be fetched, read or served |
| `load_inplace` | to load | boolean; true: replace the adapter of this name; running requests finish with the old one |
"""


def render() -> str:
    """Return the page."""
    ours = "".join(f"\n## POST {path}\n{_table(path, body)}" for path, body in ENDPOINTS.items())
    return (
        _INTRO
        + ours
        + protocols.render(_describe_values)
        + _POOLED
        + _render_sections(POOLED, POOLED_NOTES)
        + _render_sections(TOKENS, TOKEN_NOTES)
        + _LORA
    )


def _render_sections(bodies: Mapping[tuple[str, ...], type[msgspec.Struct]], notes: Mapping[str, str]) -> str:
    """Return sections in which the notes describe the fields completely."""
    return "".join(f"\n## POST {', '.join(paths)}\n{_render_notes_table(body, notes)}" for paths, body in bodies.items())


def _render_notes_table(body: type[msgspec.Struct], notes: Mapping[str, str]) -> str:
    rows = ["| field | | values |", "| --- | --- | --- |"]
    for name in sorted(body.__struct_fields__):
        kind = "refused" if name == "truncate_prompt_tokens" else "supported"
        rows.append(f"| `{name}` | {kind} | {notes[name]} |")
    return "\n".join(rows) + "\n"


def _table(path: str, body: type[CommonRequest]) -> str:
    schema = msgspec.json.schema(body)["$defs"]
    properties: dict[str, Any] = schema[body.__name__]["properties"]
    rows = ["| field | | values |", "| --- | --- | --- |"]
    for name in sorted({*properties, *OPENAI[path]}):
        if name not in properties:
            rows.append(f"| `{name}` | ignored | |")
            continue
        if name in HINTS:
            rows.append(f"| `{name}` | accepted | {HINTS[name]} |")
            continue
        if name in REFUSALS:
            refusal = REFUSALS[name]
            taken = f"taken: {', '.join(f'`{to_json(value)}`' for value in refusal.accepted)}; " if refusal.accepted else ""
            rows.append(f"| `{name}` | {'refused in part' if taken else 'refused'} | {taken}{refusal.reason} |")
            continue
        parts = [VALUES.get(name) or _describe_values(properties[name])]
        parts += [notes[name] for notes in (OWN_NOTES[path], NOTES) if name in notes]
        if name in REFUSED:
            parts.append(f"refused: {REFUSED[name]}")
        kind = "refused in part" if name in REFUSED else "supported"
        rows.append(f"| `{name}` | {kind} | {'; '.join(filter(None, parts))} |")
    return "\n".join(rows) + "\n"


def _describe_values(node: dict[str, Any]) -> str:
    """Return `integer, 1 to 128` for a field's schema, without the null that every field accepts."""
    kinds = [kind for kind in node.get("anyOf", [node]) if kind.get("type") != "null"]
    return " or ".join(_describe_type(kind) for kind in kinds)


def _describe_type(node: dict[str, Any]) -> str:
    if "items" in node:
        most = f", at most {node['maxItems']}" if "maxItems" in node else ""
        return f"array of {_describe_values(node['items'])}{most}"
    if "exclusiveMinimum" in node:
        bounds = f", above {node['exclusiveMinimum']}, at most {node['maximum']}"
    elif "maximum" in node:
        bounds = f", {node['minimum']} to {node['maximum']}"
    else:
        bounds = f", {node['minimum']} or more" if "minimum" in node else ""
    return f"{node.get('type', 'object')}{bounds}"


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    if not (root / "pyproject.toml").exists():
        raise SystemExit(f"{root} is not the root of the repository (no pyproject.toml there): run this from it, or give its path")
    (root / PAGE).write_text(render())
    print(f"{PAGE}: {len(render())} bytes")


if __name__ == "__main__":
    main()
