"""Convert the body of another API to a chat request, and the errors back to that API's field names."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fairlead_common.errors import PromptError
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.schema import ChatRequest, convert


def to_chat_request(body: dict[str, Any]) -> ChatRequest:
    """Return a body as a chat request. The chat's field rules apply to it. Raise ApiError 400."""
    return convert(body, ChatRequest)


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors to the client's names. `names`: a map from chat fields to the API's fields."""
    try:
        yield
    except PromptError as error:
        raise invalid(str(error), param=error.field) from error  # raised by the conversion itself, so the field has the client's name
    except ApiError as error:
        param = _rename(error.param, names) if error.param is not None else None
        message = _rename(error.message, names) if param is not None else error.message
        raise ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers) from error


def _rename(text: str, names: Mapping[str, str]) -> str:
    for ours, theirs in names.items():
        text = re.sub(ours, theirs, text)
    return text
