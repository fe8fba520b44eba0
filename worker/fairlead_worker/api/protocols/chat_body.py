"""A dialect's body as a chat's request, and the chat's errors in the dialect's words."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fairlead_common.errors import PromptError
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.schema import ChatRequest, convert


def to_chat_request(body: dict[str, Any]) -> ChatRequest:
    """The rules that a chat has for its fields hold for those of a dialect too. Raises ApiError 400."""
    return convert(body, ChatRequest)


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Errors name fields as the client did. `names`: the dialect's for the chat's."""
    try:
        yield
    except PromptError as error:
        raise invalid(str(error), param=error.field) from error  # of the dialect's own making, in its names
    except ApiError as error:
        param = _rename(error.param, names) if error.param is not None else None
        message = _rename(error.message, names) if param is not None else error.message
        raise ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers) from error


def _rename(text: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        text = re.sub(ours, theirs, text)
    return text
