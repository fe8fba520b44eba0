"""The base of response models, and the errors of each API."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Json = dict[str, Any]


class Answer(BaseModel):
    """A JSON object of a response. The strings below its fields are their descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ErrorFields(Answer):
    """What is wrong, and what to do."""

    message: str
    """Names the field and the fix."""
    type: str
    """`invalid_request_error`, `rate_limit_error`, `permission_error` or `server_error`."""
    param: str | None = None
    """The field of the request, if the error is about one."""
    code: str | int | None = None
    """A code that does not change, such as `context_length_exceeded`."""


class Error(Answer):
    """An error in OpenAI's form, and the last event of a stream that failed."""

    error: ErrorFields


class MessagesErrorFields(Answer):
    """What is wrong, and what to do."""

    type: str
    """Anthropic's name of the status, such as `invalid_request_error` or `overloaded_error`."""
    message: str
    """Names the field and the fix."""


class MessagesError(Answer):
    """An error in Anthropic's form, and the last event of a stream that failed."""

    type: Literal["error"]
    error: MessagesErrorFields
