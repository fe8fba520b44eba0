"""Convert the body of another API to a chat request, and the errors back to that API's field names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fairlead_common.errors import PromptError
from fairlead_common.protocols.conversion import Conversion
from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.request_warnings import add_warnings
from fairlead_worker.api.schema import ChatRequest, convert

_TOOL = re.compile(r"(?<![.\w])tools\[(\d+)\]")


def to_chat_request(conversion: Conversion) -> ChatRequest:
    """Return a body as a chat request, and warn of what it leaves out. The chat's field rules apply to it. Raise ApiError 400."""
    add_warnings(conversion.omissions.describe())
    return convert(conversion.chat, ChatRequest)


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[list[str]]:
    """Rename fields in errors to the client's names. `names`: a map from chat fields to the API's fields.

    Yield a list for the fields of the tools (`Conversion.tool_fields`): a tool that is left out has no place in the chat.
    """
    tool_fields: list[str] = []
    try:
        yield tool_fields
    except PromptError as error:
        raise invalid(str(error), param=error.field) from error  # raised by the conversion itself, so the field has the client's name
    except ApiError as error:
        param = _rename(error.param, names, tool_fields) if error.param is not None else None
        message = _rename(error.message, names, tool_fields) if param is not None else error.message
        raise ApiError(error.status, message, type=error.type, param=param, code=error.code, headers=error.headers) from error


def _rename(text: str, names: Mapping[str, str], tool_fields: Sequence[str]) -> str:
    text = _TOOL.sub(lambda found: tool_fields[int(found[1])] if int(found[1]) < len(tool_fields) else found[0], text)
    for ours, theirs in names.items():
        text = re.sub(ours, theirs, text)
    return text
