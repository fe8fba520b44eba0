"""Request parameters that the router's own decisions depend on."""

from typing import Any, Protocol

import msgspec

from fairlead_common.protocols.paths import COMPLETIONS, POOLED
from fairlead_router.request import pooling_prompts

_COMPLETION_TOKENS = 16
"""OpenAI's default for /v1/completions. A chat's default is the rest of the context."""
_MAX_INT = 2**31 - 1


class Fields(pooling_prompts.Fields, Protocol):
    """Fields of a request body, of any type: the worker validates them."""

    prompt: Any
    n: Any
    best_of: Any
    stream: Any
    max_tokens: Any
    max_completion_tokens: Any
    priority: Any
    cache_salt: Any
    previous_response_id: Any


class RequestParams(msgspec.Struct, frozen=True):
    """Parameters of one request. `max_output`: tokens of each answer, None: only the context bounds it. `sequences`: generated answers."""

    stream: bool = False
    priority: int | None = None
    max_output: int | None = None
    sequences: int = 1
    prompts: int = 1
    salt: str = ""
    """The client's own `cache_salt`."""
    previous_response: str = ""
    """Id of the stored response that a request to /v1/responses continues."""

    @classmethod
    def from_body(cls, path: str, body: Fields) -> "RequestParams":
        salt = body.cache_salt if isinstance(body.cache_salt, str) else ""
        if path in POOLED:
            return cls(priority=_number(body.priority), max_output=0, prompts=pooling_prompts.count_texts(body), salt=salt)
        bound = _number(body.max_tokens)
        bound = (_number(body.max_completion_tokens) or bound) if path != COMPLETIONS else _COMPLETION_TOKENS if bound is None else bound
        prompt = body.prompt if path == COMPLETIONS else None
        prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
        each = max(_number(body.n) or 1, _number(body.best_of) or 1)
        previous = body.previous_response_id if isinstance(body.previous_response_id, str) else ""
        return cls(body.stream is True, _number(body.priority), bound, prompts * min(each, 1024), prompts, salt, previous)


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and -_MAX_INT <= value <= _MAX_INT else None
