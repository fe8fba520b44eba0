"""Reading of one request body: its fields, then the tokens and block hashes of its prompt.

It knows no state of the router, so it runs in this process or in one of `parser_pool`.
"""

from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import xxhash

from fairlead_common.json_size import JsonSize, read_float
from fairlead_common.prompts.chat_request import build_encode_kwargs
from fairlead_common.prompts.encoder import PromptEncoder, PromptError, PromptTooLong
from fairlead_common.protocols.chats import needs_conversion, read_chat
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, EMBEDDINGS, MESSAGES, POOLED, RESPONSES
from fairlead_index.hashing import block_hashes
from fairlead_router.request import validation

CHATS = (CHAT, RESPONSES, MESSAGES)
_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat's default is the rest of the context."""
_MAX_INT = 2**31 - 1
_TEXTS = ("input", "text_1", "text_2", "data_1", "data_2", "query", "queries", "documents", "items")
"""Fields with the texts of embedding and scoring requests, of any type: they are not validated."""


class RenderedFields(msgspec.Struct):
    """Fields that determine how an engine renders a chat."""

    model: Any = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None


class Body(RenderedFields):
    """Fields that determine the prompt and the routing. The worker validates the others, and the types of these."""

    user: Any = None
    prompt: Any = None
    n: Any = None
    best_of: Any = None
    chat_template: Any = None
    documents: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None
    cache_salt: Any = None
    previous_response_id: Any = None
    input: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    query: Any = None
    queries: Any = None
    items: Any = None


class RequestParams(msgspec.Struct, frozen=True, tag=True):
    """What the router's own decisions need of a body, beside its prompt."""

    path: str = ""
    """Of the request; of a body without one, the path that it fits."""
    model: str | None = None
    user: str = ""
    stream: bool = False
    priority: int | None = None
    max_output: int | None = None
    """Tokens of each answer; None: only the context bounds it."""
    sequences: int = 1
    """Generated answers."""
    prompts: int = 1
    salt: str = ""
    """The client's own `cache_salt`."""
    previous_response: str = ""
    """Id of the stored response that a request to /v1/responses continues."""
    conversation: int = 0
    """As `conversation_of`; 0 if it was not wanted."""
    size: JsonSize = JsonSize(0, 0)


class Chain(msgspec.Struct, frozen=True):
    """A chain of block hashes: its format's tag, its root and its block length in tokens."""

    tag: str
    root: int
    block_tokens: int


class Encoding(msgspec.Struct, frozen=True):
    """How a prompt is encoded. `chains`: those of the formats with these tokens; none for a prompt without KV, as of an embedding."""

    salt: str
    max_tokens: int
    chains: list[Chain]


class Encoded(NamedTuple):
    """A prompt's tokens and their block hashes in each chain."""

    tokens: "array[int] | None"
    """None for a prompt that only the worker can read or refuse."""
    hashes: "list[array[int]]"
    is_single: bool
    """Whether the worker may use the tokens instead of the text."""
    computed: int
    """Tokens that were computed, also of a prompt that turned out to be too long."""
    min_tokens: int = 0
    """Least number of tokens of a prompt that exceeds the longest context; 0 for any other."""


_decoder = msgspec.json.Decoder(Body, float_hook=read_float)


def read_fields(path: str, raw: bytes, session: str, has_canaries: bool, size: JsonSize) -> tuple[RequestParams, Body]:
    """Decode a body of a size that `check_json` allows. An empty `path` stands for that of a chat, or of a completion without messages.

    Raises ApiError 400 for a body that is not a JSON object.
    """
    try:
        body = _decode(path, raw)
    except validation.DECODING as error:  # a number out of range, or not a JSON object
        raise validation.decode_error(error) from None
    path = path or (COMPLETIONS if body.messages is None else CHAT)
    conversation = conversation_of(body.messages, body.prompt, session) if has_canaries else 0
    return _read_params(path, body, conversation, size), body


def _read_params(path: str, body: Body, conversation: int, size: JsonSize) -> RequestParams:
    bound = _number(body.max_tokens)
    sequences = prompts = 1
    if path in POOLED:
        bound, prompts = 0, _count_texts(body)
    else:
        if path != COMPLETIONS:
            bound = _number(body.max_completion_tokens) or bound
        else:
            bound = _COMPLETION_TOKENS if bound is None else bound
            if isinstance(body.prompt, list) and body.prompt and isinstance(body.prompt[0], str | list):
                prompts = len(body.prompt)
        sequences = prompts * min(1024, max(_number(body.n) or 1, _number(body.best_of) or 1))
    return RequestParams(
        path,
        body.model if isinstance(body.model, str) else None,
        body.user if isinstance(body.user, str) else "",
        body.stream is True and path not in POOLED,
        _number(body.priority),
        bound,
        sequences,
        prompts,
        body.cache_salt if isinstance(body.cache_salt, str) else "",
        body.previous_response_id if isinstance(body.previous_response_id, str) else "",
        conversation,
        size,
    )


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -_MAX_INT <= value <= _MAX_INT else None


def encode(path: str, body: Body, encoder: PromptEncoder, encoding: Encoding) -> Encoded:
    """Tokenize and hash the first prompt of a body."""
    try:
        tokens, is_single = _encode(path, body, encoder, encoding.salt, encoding.max_tokens)
    except PromptTooLong as error:
        return Encoded(None, [], False, error.computed, error.min_tokens)
    except (PromptError, TypeError, ValueError, OverflowError, RecursionError):
        tokens, is_single = None, False  # the worker refuses it with its own message
    if tokens is None:
        return Encoded(None, [], False, 0)
    hashes = [block_hashes(chain.root, tokens, chain.block_tokens) for chain in encoding.chains]
    return Encoded(tokens, hashes, is_single, len(tokens))


def _decode(path: str, raw: bytes) -> Body:
    """Return the fields. A body of Responses or Messages is converted to the equivalent chat, and has no messages if that fails."""
    if not needs_conversion(path):
        return _decoder.decode(raw)
    try:
        return msgspec.convert(read_chat(path, raw), Body)
    except (msgspec.DecodeError, UnicodeDecodeError, PromptError, RecursionError):
        body = _decoder.decode(raw)
        body.messages = body.prompt = None
        return body


def _encode(path: str, body: Body, encoder: PromptEncoder, salt: str, max_tokens: int) -> "tuple[array[int] | None, bool]":
    """Return the (first) prompt's tokens, and whether the worker may use them instead of the text.

    `salt` separates tenants in the token cache.
    """
    if path in POOLED:
        if path != EMBEDDINGS:
            return None, False  # several texts in separate fields
        return _encode_only_text(body, lambda text: encoder.encode_text(text, scope=salt, max_tokens=max_tokens)), True
    if body.truncate_prompt_tokens is not None:
        return None, False  # the worker's context and the answer's length decide how much remains
    is_single = body.n in (None, 1) and body.best_of in (None, 1)
    if path in CHATS:
        if body.chat_template is not None or body.documents is not None or body.messages is None:
            return None, False
        return encoder.encode_chat(**build_encode_kwargs(body), scope=salt, max_tokens=max_tokens), is_single
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        is_single = is_single and len(prompt) == 1
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and bool not in set(map(type, prompt)):
        return array("I", prompt), is_single
    if not isinstance(prompt, str) or not prompt:
        return None, False
    return encoder.encode_text(prompt, body.add_special_tokens is not False, salt, max_tokens), is_single


def conversation_of(messages: Any, prompt: Any, session: str) -> int:
    """Return a number that all requests of a conversation share: of the session if the client names one, else of a chat's beginning.

    The beginning ends with the first user message, which tells chats with a common system prompt apart. A text prompt has no such boundary
    (its first block may be the same in all prompts), so each one is a separate conversation.
    """
    if session:
        beginning: Any = session
    elif isinstance(messages, list):
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        beginning = messages[: roles.index("user") + 1] if "user" in roles else messages
    else:
        beginning = prompt
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(beginning)) or 1


# Embedding and scoring requests. Only their token count matters: a mean over all tokens cannot use cached KV, so no prefix match is
# predicted.


def _count_texts(body: Body) -> int:
    return max(1, sum(_count(getattr(body, name)) for name in _TEXTS))


def _count(given: Any) -> int:
    if isinstance(given, list):
        return len(given) if given and isinstance(given[0], str | list | dict) else 1
    return given is not None


def _encode_only_text(body: Body, encode: "Callable[[str], array[int]]") -> "array[int] | None":
    """Return the token ids of an embedding's only text; None for several texts, a truncated one, or an invalid body."""
    given = body.input if body.truncate_prompt_tokens is None else None
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return encode(given) if given else None
    if isinstance(given, list) and given and set(map(type, given)) == {int}:
        return array("I", given)
    return None
