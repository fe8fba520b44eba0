"""What each kind of hostile client sends. Pure: the bytes of whole HTTP requests, the same for one seed."""

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Target = Literal["router", "batch"]
"""The process that the input is for. A batch server gets it through the router."""
MODEL, KEY = "tiny", "fl-hostile-key-which-is-random-in-life"
BODY = 8 << 20
"""Largest body of a router by default, bytes."""
_MARGIN = 4096
COMPLETIONS, CHAT, RESPONSES, FILES, BATCHES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/files", "/v1/batches"


@dataclass(frozen=True)
class Kind:
    """One row of the table."""

    name: str
    build: Callable[[random.Random], Sequence[bytes]]
    """Returns the requests that each connection repeats in turn."""
    target: Target = "router"
    reads: bool = True
    """Read each answer before the next request; else all is sent at once and nothing read."""
    makes_batches: bool = False
    """Create a batch of each file that was uploaded."""
    disconnects: bool = False
    """Close the connection as soon as a request is sent."""
    connections: int = 0
    """Hostile connections, instead of those of `--connections`."""
    computes: bool = False
    """Send nothing: two processes that are no part of Fairlead compute beside it."""


def request(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """Return a request with the hostile tenant's key."""
    fields = {"host": "bench", "authorization": f"Bearer {KEY}", "content-type": "application/json", "content-length": str(len(body))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (fields | dict(headers or {})).items()), "", ""]
    return "\r\n".join(lines).encode() + body


def post(path: str, fields: Mapping[str, Any]) -> bytes:
    return request("POST", path, json.dumps({"model": MODEL, **fields}, separators=(",", ":")).encode())


def raw(path: str, fields: str) -> bytes:
    """Return a POST whose body has `fields`, JSON as it is, beside the model."""
    return request("POST", path, f'{{"model":"{MODEL}",{fields}}}'.encode())


def repeat(atom: str, size: int = BODY - _MARGIN, separator: str = ",") -> str:
    """Return the atom as often as it fits into `size` bytes, separated."""
    return separator.join([atom] * (size // (len(atom.encode()) + len(separator))))


def form(fields: Sequence[tuple[str, str, bytes]]) -> bytes:
    """Return an upload. `fields`: name, file name (empty: none), content."""
    boundary = "hostile"
    parts = []
    for name, file, content in fields:
        disposition = f'form-data; name="{name}"' + (f'; filename="{file}"' if file else "")
        parts.append(f"--{boundary}\r\ncontent-disposition: {disposition}\r\n\r\n".encode() + content + b"\r\n")
    body = b"".join(parts) + f"--{boundary}--\r\n".encode()
    return request("POST", FILES, body, {"content-type": f"multipart/form-data; boundary={boundary}"})


def upload(content: bytes) -> bytes:
    return form([("purpose", "", b"batch"), ("file", "in.jsonl", content)])


def _objects(count: int) -> str:
    return ",".join(f'"{number:x}":0' for number in range(count))


def _schema(properties: int, prefix: str = "") -> dict[str, Any]:
    value = {"anyOf": [{"type": "string", "pattern": "^[a-z]{1,64}$"}, {"type": "integer"}]}
    named = {f"{prefix}{number}": value for number in range(properties)}
    return {"type": "object", "properties": named, "required": list(named)}


def _structured(schema: dict[str, Any]) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "response_format": form}


def _schemas(draw: random.Random) -> list[bytes]:
    """Return schemas as large as a worker takes, each a new one, and one beyond."""
    return [post(CHAT, _structured(_schema(properties, f"{draw.randrange(10**6)}_"))) for properties in [500] * 16 + [5000]]


def _tools(draw: random.Random) -> list[bytes]:
    """Return as many tools as a worker takes, and more."""
    user = [{"role": "user", "content": "x"}]
    tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": _schema(3)}} for number in range(5000)]
    return [post(CHAT, {"messages": user, "max_tokens": 1, "tools": tools[:count]}) for count in (512, 5000)]


def _hashes(draw: random.Random) -> list[bytes]:
    count = (BODY - _MARGIN) // 21
    return [raw("/query_by_hash", f'"seq_hashes":[{",".join(str(draw.randrange(10**18, 2**63)) for _ in range(count))}]')]


def _many_headers(draw: random.Random) -> list[bytes]:
    headers = {f"x-{number}-{draw.randrange(10**6)}": "y" * 400 for number in range(100)}
    return [request("POST", COMPLETIONS, b'{"model":"tiny","prompt":"x","max_tokens":1}', headers)]


def _words(draw: random.Random, count: int) -> str:
    return " ".join(f"{draw.randrange(16**6):x}" for _ in range(count))


def _marks(draw: random.Random, count: int) -> str:
    """Return a text of which each character is a token."""
    return "".join(draw.choice("!?;%&") for _ in range(count))


def _ambiguous(draw: random.Random) -> list[bytes]:
    """Return grammars whose masks take long, because each text has many derivations."""
    grammar = 'root ::= a\na ::= a a | [a-z{}] | "" | a a a'
    numbers = [draw.randrange(10**9) for _ in range(20)]
    asked = {"prompt": "x", "max_tokens": 400, "temperature": 1}
    return [post(COMPLETIONS, asked | {"structured_outputs": {"grammar": grammar.format(number)}}) for number in numbers]


_CHOICES = {"prompt": "x", "n": 128, "max_tokens": 10, "ignore_eos": True}
_SMALL = {"prompt": "x", "max_tokens": 1}
_USER = '{"role":"user","content":""}'

KINDS: tuple[Kind, ...] = (
    Kind("other programs", lambda _: [], computes=True),
    Kind("nested arrays", lambda _: [raw(CHAT, f'"prompt":"x","messages":[{repeat("[]")}]')]),
    Kind("deep JSON", lambda _: [raw(CHAT, f'"messages":{"[" * (BODY - _MARGIN)}')]),
    Kind("wide object", lambda _: [raw(COMPLETIONS, f'"prompt":"x",{_objects(780_000)}')]),
    Kind("arrays of 250 KB", lambda _: [raw(CHAT, f'"prompt":"x","messages":[{repeat("[]", 250_000)}]')]),
    Kind("long keys", lambda _: [raw(COMPLETIONS, ",".join(f'"{letter * 1_000_000}":0' for letter in "abcdefg") + ',"prompt":"x"')]),
    Kind("empty messages", lambda _: [raw(CHAT, f'"messages":[{repeat(_USER)}]')]),
    Kind("many prompts", lambda _: [post(COMPLETIONS, {"prompt": ["x " * 3000] * count, "max_tokens": 1}) for count in (1000, 1300)]),
    Kind("short prompts", lambda _: [post(COMPLETIONS, {"prompt": ["a"] * 240, "max_tokens": 1})]),
    Kind("many connections", lambda _: [post(COMPLETIONS, _SMALL)], connections=512),
    Kind("punctuation", lambda _: [raw(COMPLETIONS, f'"prompt":"{repeat("! ?", separator="")}"')]),
    Kind("dense text", lambda _: [raw(COMPLETIONS, f'"max_tokens":1,"prompt":"{repeat("! ?", 250_000, separator="")}"')]),
    Kind("dense text that fits", lambda draw: [post(COMPLETIONS, _SMALL | {"prompt": _marks(draw, 4000)}) for _ in range(50)]),
    Kind(
        "cut prompts",
        lambda draw: [post(COMPLETIONS, _SMALL | {"truncate_prompt_tokens": 8, "prompt": _words(draw, 60_000)}) for _ in range(4)],
    ),
    Kind("many choices", lambda _: [post(COMPLETIONS, _SMALL | {"max_tokens": 400, "n": 64, "ignore_eos": True})]),
    Kind("biased choices", lambda _: [post(COMPLETIONS, _CHOICES | {"logit_bias": {str(token): 1 for token in range(1000)}})]),
    Kind("stop tokens", lambda _: [post(COMPLETIONS, _CHOICES | {"min_tokens": 9, "stop_token_ids": list(range(3, 1000))})]),
    Kind("late masks", _ambiguous),
    Kind(
        "prompt logprobs",
        lambda draw: [post(COMPLETIONS, _SMALL | {"prompt": [_words(draw, 60) for _ in range(16)], "prompt_logprobs": 20})],
    ),
    Kind("one long word", lambda _: [raw(COMPLETIONS, f'"prompt":"{"a" * (BODY - _MARGIN)}"')]),
    Kind("combining marks", lambda _: [raw(COMPLETIONS, f'"prompt":"{repeat("e" + chr(0x301) + chr(0x323), separator="")}"')]),
    Kind("escapes", lambda _: [raw(COMPLETIONS, f'"prompt":"{repeat(chr(92) + "u0021", separator="")}"')]),
    Kind(
        "long numbers",
        lambda _: [raw(COMPLETIONS, f'"prompt":"x","max_tokens":{"9" * 4_000_000}'), raw(COMPLETIONS, f'"prompt":[{repeat("9" * 300)}]')],
    ),
    Kind("new prompts", lambda draw: [post(COMPLETIONS, {"prompt": _words(draw, 300), "max_tokens": 1}) for _ in range(500)]),
    Kind("hash list", _hashes),
    Kind("token query", lambda _: [raw("/query", f'"token_ids":[{repeat("7")}]')]),
    Kind("tokenize", lambda draw: [post("/tokenize", {"prompt": _words(draw, 30_000)}) for _ in range(8)]),
    Kind("huge schemas", _schemas),
    Kind("many tools", _tools),
    Kind("logit bias", lambda _: [raw(COMPLETIONS, f'"prompt":"x","max_tokens":1,"logit_bias":{{{_objects(300_000)}}}')]),
    Kind("adapter names", lambda draw: [post(COMPLETIONS, _SMALL | {"model": f"adapter-{draw.randrange(10**9)}"}) for _ in range(1000)]),
    Kind(
        "stored answers",
        lambda draw: [post(RESPONSES, {"input": _words(draw, 100), "max_output_tokens": 1, "store": True}) for _ in range(500)],
    ),
    Kind("slow readers", lambda _: [request("GET", "/openapi.json")] * 4, reads=False),
    Kind(
        "disconnects",
        lambda draw: [post(COMPLETIONS, {"prompt": _words(draw, 300), "max_tokens": 64}) for _ in range(200)],
        disconnects=True,
    ),
    Kind("pipelining", lambda _: [post(COMPLETIONS, _SMALL) * 500], reads=False),
    Kind("many headers", _many_headers),
    Kind("gzip bomb", lambda _: [request("POST", COMPLETIONS, gzip.compress(bytes(256 << 20), mtime=0), {"content-encoding": "gzip"})]),
    Kind("repeated fields", lambda _: [form([("purpose", "", b"batch")] * 90_000)], target="batch"),
    Kind("many small files", lambda _: [upload(b"{}\n")], target="batch"),
    Kind("empty lines", lambda _: [upload(b"\n" * (20 << 20))], target="batch", makes_batches=True),
)
