"""Write the pages of reference/api/ that list request and response fields, from the worker's OpenAPI document.

mkdocs calls `on_files` at each build, so that these pages cannot differ from the code.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fairlead_common.protocols.fields import SHARED_FIELDS
from fairlead_common.protocols.paths import (
    CHAT,
    CLASSIFICATIONS,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    MESSAGES,
    POOLING,
    RERANKS,
    RESPONSES,
    SCORES,
)
from fairlead_worker.api.generation.unsupported_fields import HINTS, REFUSALS, to_json
from fairlead_worker.api.protocols.field_table import BODIES as PROTOCOL_BODIES
from fairlead_worker.api.protocols.field_table import NOTES as PROTOCOL_NOTES
from fairlead_worker.api.reference.fields import (
    ENDPOINTS,
    LORA_NOTES,
    NOTES,
    OWN_NOTES,
    POOLED_BY_PATH,
    POOLED_NOTES,
    REFUSED,
    TOKEN_BY_PATH,
    TOKEN_NOTES,
    VALUES,
)
from fairlead_worker.api.reference.openapi import build_document
from fairlead_worker.api.routes.apis import select_apis
from fairlead_worker.api.schema import LoadLoraRequest

GENERATED = "<!-- Generated from the code by docs/generate/api.py. -->\n\n"
Row = tuple[str, str]
ANSWERS = {
    "completions": ("completions", (COMPLETIONS,)),
    "chat": ("chat completions", (CHAT,)),
    "responses": ("Responses", (RESPONSES,)),
    "messages": ("Messages", (MESSAGES, COUNT_TOKENS)),
    "embeddings": ("embeddings, scores, reranking and classes", (EMBEDDINGS, POOLING, SCORES[0], RERANKS[0], CLASSIFICATIONS[0])),
    "tokenize": ("tokenize and detokenize", ("/tokenize", "/detokenize")),
}
"""By page of requests: the title of its page of answers, and their paths."""
ANSWER_INTRODUCTION = """[The page of the requests]({page}.md) lists their fields. [Errors](errors.md) have a page of their own.
An optional field can be absent.
"""
INTRODUCTIONS = {
    COMPLETIONS: """# Completions

`POST /v1/completions` is OpenAI's text completion API with vLLM's extra fields.
[HTTP API](index.md) explains streams, headers and unknown fields. [Limits](../limits.md) lists the bounds of each value.
[Structured output](../../guides/structured-output.md) explains `response_format`, `structured_outputs` and the `guided_` fields.
""",
    CHAT: """# Chat completions

`POST /v1/chat/completions` is OpenAI's chat API with vLLM's extra fields.
[HTTP API](index.md) explains streams, headers and unknown fields. [Limits](../limits.md) lists the bounds of each value.
[Structured output](../../guides/structured-output.md) explains `response_format`, `structured_outputs` and the `guided_` fields.
[Tool calls and reasoning](../../guides/tools.md) explains `tools`, `tool_choice` and `reasoning_effort`.
""",
    RESPONSES: """# Responses

`POST /v1/responses` is OpenAI's Responses API. [Responses and Messages](../protocols.md) explains how it maps to chat completions, and
which responses are [stored](../protocols.md#stored-responses).
""",
    MESSAGES: """# Messages

`POST /v1/messages` is Anthropic's Messages API without server-side state.
[Responses and Messages](../protocols.md) explains how it maps to chat completions.

`POST /v1/messages/count_tokens` takes the same fields and returns `input_tokens`. It generates nothing. It refuses what `/v1/messages`
refuses, except a prompt that is too long.
""",
    EMBEDDINGS: """# Embeddings, scores, reranking and classes

Embeddings have unit length. They are the last hidden states of the model, pooled as the model's files or `--pooling` define. A score is the
cosine of two embeddings. A reranker (a head with one label) reads both texts as one input, and its head gives the score. A model with
several labels serves `/classify`. [Models](../../guides/models.md#embeddings-and-scores) says which models can do this. These requests run
in the same engine steps as generation, and count as prompt tokens.
""",
    "/tokenize": """# Tokenize and detokenize

These two endpoints have vLLM's form. They count against a tenant's token quota with one token for four bytes of the body.
""",
    "/v1/load_lora_adapter": """# LoRA adapters at run time

`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` load and unload adapters on one worker, as in vLLM. A worker serves them on
its admin port, and only with `FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING=true`; otherwise it answers 403. The router does not have them. The
response is one line of text. Prefer to declare adapters in the manifest: [LoRA adapters](../../guides/lora.md).
""",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the placeholders in the repository by the generated pages."""
    for path, text in pages().items():
        if placeholder := files.get_file_from_path(path):  # for readers of the repository
            files.remove(placeholder)
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each page, by its path."""
    made = {
        "completions": [INTRODUCTIONS[COMPLETIONS], *_openai_sections(COMPLETIONS)],
        "chat": [INTRODUCTIONS[CHAT], *_openai_sections(CHAT)],
        "responses": [INTRODUCTIONS[RESPONSES], *_protocol_sections(RESPONSES)],
        "messages": [INTRODUCTIONS[MESSAGES], *_protocol_sections(MESSAGES)],
        "embeddings": [
            INTRODUCTIONS[EMBEDDINGS],
            *(_section(_title(paths), _notes(body, POOLED_NOTES)) for paths, body in POOLED_BY_PATH.items()),
        ],
        "tokenize": [
            INTRODUCTIONS["/tokenize"],
            *(_section(_title(paths), _notes(body, TOKEN_NOTES)) for paths, body in TOKEN_BY_PATH.items()),
        ],
        "lora": [INTRODUCTIONS["/v1/load_lora_adapter"], _section("Request fields", _notes(LoadLoraRequest, LORA_NOTES))],
    }
    document = build_document(select_apis("all"))
    for name, (title, paths) in ANSWERS.items():
        made[f"{name}-answers"] = [f"# Answers: {title}\n\n{ANSWER_INTRODUCTION.format(page=name)}", *_answer_sections(document, paths)]
    return {f"reference/api/{name}.md": GENERATED + "\n".join(sections) for name, sections in made.items()}


def _title(paths: Iterable[str]) -> str:
    return f"POST {', '.join(paths)}"


def _section(title: str, rows: Iterable[Row], header: Row = ("Field", "Values")) -> str:
    lines = [f"## {title}", "", f"| {' | '.join(header)} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in rows)]) + "\n"


def _notes(body: type[msgspec.Struct], notes: Mapping[str, str]) -> Iterator[Row]:
    """Yield rows for a struct whose fields the notes describe completely."""
    return ((name, notes[name]) for name in sorted(body.__struct_fields__))


def _openai_sections(path: str) -> Iterator[str]:
    """Yield the sections of the completion or the chat API."""
    properties = _properties(ENDPOINTS[path])
    supported = [name for name in sorted(properties) if name not in HINTS and name not in REFUSALS]

    def describe(name: str) -> str:
        parts = [VALUES.get(name) or describe_values(properties[name])]
        parts += [notes[name] for notes in (OWN_NOTES[path], NOTES) if name in notes]
        parts.append(REFUSED.get(name, ""))
        return "; ".join(filter(None, parts))

    yield _section("Supported fields", ((name, describe(name)) for name in supported))
    yield _section(
        "Unsupported fields",
        ((name, _describe_refusal(REFUSALS[name].accepted, REFUSALS[name].reason)) for name in sorted(properties.keys() & REFUSALS.keys())),
        ("Field", "Accepted values and reason"),
    )
    if hints := sorted(properties.keys() & HINTS.keys()):
        yield _section("Fields without effect", ((name, HINTS[name]) for name in hints), ("Field", "Reason"))


def _describe_refusal(accepted: tuple[Any, ...], reason: str) -> str:
    values = " or ".join(f"`{to_json(value)}`" for value in accepted)
    return f"{f'only {values}' if values else 'refused'}: {reason}"


def _protocol_sections(path: str) -> Iterator[str]:
    """Yield the sections of the Responses or the Messages API."""
    body, refused, allowed = PROTOCOL_BODIES[path]
    properties = _properties(body)
    limited = refused.keys() | allowed.keys()

    def describe(name: str) -> str:
        # Fields that the rules of chats check have no type of their own.
        kind = describe_values(properties[name]) if properties[name].keys() & {"type", "anyOf"} else ""
        return "; ".join(filter(None, (kind, PROTOCOL_NOTES[path].get(name))))

    own = (name for name in sorted(properties) if name not in limited and name not in SHARED_FIELDS)
    yield _section("Supported fields", ((name, describe(name)) for name in own))
    shared = ", ".join(f"`{name}`" for name in sorted(SHARED_FIELDS))
    yield f"## Fields of chat completions\n\nThese fields work as in [chat completions](chat.md): {shared}.\n"
    rows = [(name, re.sub(r"^(not supported[;:,] )?", "refused: ", reason)) for name, reason in refused.items()]
    rows += [(name, "only " + " or ".join(f"`{value}`" for value in values)) for name, values in allowed.items()]
    if rows:
        yield _section("Unsupported fields", sorted(rows), ("Field", "Accepted values and reason"))


def _answer_sections(document: Mapping[str, Any], paths: Iterable[str]) -> Iterator[str]:
    """Yield a section for the answers of each path, then one for the events of its stream. No object is listed twice."""
    listed: set[str] = set()
    for path in paths:
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        for media, title in (("application/json", "Answer"), ("text/event-stream", "Events of a stream")):
            if media not in content:
                continue
            names = [name for name in _walk(document["components"]["schemas"], content[media]["schema"]) if name not in listed]
            listed.update(names)
            if names:
                yield f"## {title} of `{path}`\n"
            yield from (_object_table(name, document["components"]["schemas"][name]) for name in names)


def _walk(schemas: Mapping[str, Any], node: Any, seen: dict[str, None] | None = None) -> dict[str, None]:
    """Return the names of the schemas that a node refers to, in the order of the fields."""
    seen = {} if seen is None else seen
    if isinstance(node, Mapping):
        name = str(node.get("$ref", "")).rpartition("/")[2]
        if name and name not in seen:
            seen[name] = None
            _walk(schemas, schemas[name], seen)
        for key, each in node.items():
            if key != "discriminator":  # names every schema again, in another order
                _walk(schemas, each, seen)
    elif isinstance(node, list):
        for each in node:
            _walk(schemas, each, seen)
    return seen


def _object_table(name: str, schema: Mapping[str, Any]) -> str:
    if "properties" not in schema:
        return f"`{name}`: {schema.get('description', '')} One of {_describe_field(schema)}.\n"
    required = schema.get("required", ())
    rows = [
        f"| `{field}` | {_describe_field(node)}{'' if field in required else ', optional'}{note and '. ' + note} |"
        for field, node in schema["properties"].items()
        for note in (node.get("description", ""),)
    ]
    return "\n".join([f"`{name}`: {schema['description']}", "", "| Field | Value |", "| --- | --- |", *rows]) + "\n"


def _describe_field(node: Mapping[str, Any]) -> str:
    """Return `array of ChatChoice` or `"stop" or "length"` for the schema of a response's field."""
    if kinds := node.get("anyOf") or node.get("oneOf"):
        return " or ".join(_describe_field(kind) for kind in kinds)
    if "$ref" in node:
        return f"`{node['$ref'].rpartition('/')[2]}`"
    if values := node.get("enum") or [node[key] for key in ("const",) if key in node]:
        return " or ".join(f"`{to_json(value)}`" for value in values)
    if node.get("type") == "array":
        return f"array of {_describe_field(node.get('items', {}))}"
    return str(node.get("type", "any value"))


def _properties(body: type[msgspec.Struct]) -> dict[str, Any]:
    properties: dict[str, Any] = msgspec.json.schema(body)["$defs"][body.__name__]["properties"]
    return properties


def describe_values(node: Mapping[str, Any]) -> str:
    """Return `integer, 1 to 128` for the schema of a field, without the null that every field accepts."""
    kinds = [kind for kind in node.get("anyOf", [node]) if kind.get("type") != "null"]
    return " or ".join(_describe_type(kind) for kind in kinds)


def _describe_type(node: Mapping[str, Any]) -> str:
    if "items" in node:
        most = f", at most {node['maxItems']}" if "maxItems" in node else ""
        return f"array of {describe_values(node['items'])}{most}"
    if "exclusiveMinimum" in node:
        bounds = f", above {node['exclusiveMinimum']}, at most {node['maximum']}"
    elif "maximum" in node:
        bounds = f", {node['minimum']} to {node['maximum']}"
    else:
        bounds = f", {node['minimum']} or more" if "minimum" in node else ""
    return f"{node.get('type', 'object')}{bounds}"
