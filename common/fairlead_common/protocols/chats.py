"""The paths whose bodies are converted to chat completions, and the conversion."""

from collections.abc import Callable
from typing import Any

import msgspec

from fairlead_common.protocols import messages, responses
from fairlead_common.protocols.conversion import Conversion
from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES, RESPONSES

_RESPONSES = msgspec.json.Decoder(responses.ResponsesBody)
_MESSAGES = msgspec.json.Decoder(messages.MessagesBody)
_READERS: dict[str, Callable[[bytes], Conversion]] = {
    RESPONSES: lambda raw: responses.convert(_RESPONSES.decode(raw)),
    MESSAGES: lambda raw: messages.convert(_MESSAGES.decode(raw)),
    COUNT_TOKENS: lambda raw: messages.convert(_MESSAGES.decode(raw)),
}


def needs_conversion(path: str) -> bool:
    """Return whether bodies of `path` are converted to chat completions."""
    return path in _READERS


def read_chat(path: str, raw: bytes) -> dict[str, Any]:
    """Return the chat completion equivalent to the body `raw`. Raises PromptError, or msgspec.DecodeError."""
    return _READERS[path](raw).chat


def read_conversion(path: str, raw: bytes) -> Conversion:
    """Return the body `raw` as a chat, with what the chat does not have of it. Raises as `read_chat`."""
    return _READERS[path](raw)
