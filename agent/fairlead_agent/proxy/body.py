"""The request bodies that the engine gets: without the router's token ids, with the salt and the usage that Fairlead needs. Pure."""

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from fairlead_common.json_size import JsonTooLarge, check_json
from fairlead_common.protocols.paths import CHAT, COMPLETIONS
from fairlead_index.hashing import Tokens, tokens_from_bytes
from fairlead_index.salts import cache_salt

TOKENS, SALT, USAGE = "x-fairlead-prompt-tokens", "x-fairlead-cache-salt", "x-fairlead-usage"
PRIORITY = "x-fairlead-priority"
Takes = Callable[[str, str], bool]
"""`takes(path, field)`: whether the engine's bodies for this path have the field."""


class Refused(Exception):
    """A request that must not reach the engine. `status`: of the answer; with 501, another engine may answer it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class EngineBody:
    """A body for the engine, and what the agent reads of it. `data` and `tokens` are let go when they are no longer needed."""

    data: bytes
    tokens: Tokens = ()
    """Token ids of the prompt, if the router sent them."""
    model: str = ""
    salt: str = ""
    priority: int | None = None
    """Lower is sooner; None: neither the router nor the client gave one."""
    stream: bool = False
    adds_usage: bool = False
    """The stream ends with a comment with its usage, for the router."""
    hides_usage: bool = False
    """The client did not ask for the stream's usage event."""


def build_body(
    path: str, headers: Mapping[str, str], body: bytes, fields: dict[str, msgspec.Raw], runtime: str, takes: Takes
) -> EngineBody:
    """Return the engine's body of a request, still without its tokens. `fields`: of the body, without token ids. Raises Refused."""
    salt = headers.get(SALT, "")
    if not re.fullmatch("[0-9a-f]{0,64}", salt):
        raise Refused(400, "X-Fairlead-Cache-Salt: must be hexadecimal digits, at most 64")
    given, model = _text(fields.get("cache_salt")), _text(fields.get("model"))
    salt = salt or (cache_salt(b"", "", given) if given else "")
    changes: dict[str, object] = {}
    if salt:
        if runtime == "sglang":
            raise Refused(501, "SGLang's KV events do not tell salts apart, so caches of tenants cannot be kept apart: use vLLM")
        if not takes(path, "cache_salt"):
            raise Refused(501, f"vLLM's {path} takes no cache salt, so caches of tenants cannot be kept apart: use {CHAT}")
        changes["cache_salt"] = salt
    priority = None
    if re.fullmatch("-?[0-9]{1,18}", given_priority := headers.get(PRIORITY, "")):
        priority = int(given_priority)  # of the service class, or the client's own: at most as urgent as its key
        if "priority" in fields or (runtime == "vllm" and priority and takes(path, "priority")):
            changes["priority"] = priority
    if (xargs := fields.get("vllm_xargs")) is not None:
        changes |= _without_report_mode(xargs)
    stream = bytes(fields.get("stream", b"")) == b"true"
    adds_usage = stream and USAGE in headers
    hides_usage = False
    if adds_usage and path in (COMPLETIONS, CHAT):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # the engine refuses other types
            options = msgspec.json.decode(fields.get("stream_options") or b"null", type=dict[str, msgspec.Raw] | None) or {}
            hides_usage = bytes(options.get("include_usage", b"")) != b"true"
            changes["stream_options"] = options | {"include_usage": msgspec.Raw(b"true")}
    if changes:
        body = msgspec.json.encode(fields | changes)
    return EngineBody(body, (), model, salt, priority, stream, adds_usage, hides_usage)


def decode_fields(body: bytes, max_tokens: int) -> dict[str, msgspec.Raw]:
    """Return the fields of a body. `max_tokens`: token ids of the longest prompt. Raises Refused.

    Engines read more than JSON, such as NaN and UTF-16. Such a body would reach the engine without its salt, and unchecked.
    """
    try:
        check_json(body, max_tokens)
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except JsonTooLarge as error:
        raise Refused(400, f"the body is too large to decode: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"the body is not a JSON object in UTF-8: {error}") from error


def split_tokens(count: str | None, body: bytes, max_tokens: int) -> tuple[Tokens, bytes]:
    """Return the prompt's token ids, which stand before the JSON as uint32, and the JSON. Raises Refused.

    `count`: of the router's header; None: there are none. `max_tokens`: of the longest prompt.
    """
    if count is None:
        return (), body
    if not re.fullmatch("[0-9]{1,12}", count) or 4 * int(count) > len(body):
        raise Refused(400, f"X-Fairlead-Prompt-Tokens: {count[:20]!r} does not fit a body of {len(body)} bytes")
    if int(count) > max_tokens:
        raise Refused(400, f"the prompt has {int(count)} tokens, and the engine's context {max_tokens}: send a shorter one")
    end = 4 * int(count)
    return tokens_from_bytes(body[:end]), body[end:]


def _without_report_mode(xargs: msgspec.Raw) -> dict[str, object]:
    """Return the change of `vllm_xargs` that takes out the argument with which vLLM reports reused blocks as stored; empty: none."""
    try:
        values = msgspec.json.decode(xargs, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}  # the engine refuses other types, and the agent what is not UTF-8
    if "kv_cache_report_mode" not in values:
        return {}
    return {"vllm_xargs": {name: value for name, value in values.items() if name != "kv_cache_report_mode"}}


def _text(value: msgspec.Raw | None) -> str:
    """Return a JSON string; empty for anything else."""
    try:
        return msgspec.json.decode(value, type=str) if value is not None else ""
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
