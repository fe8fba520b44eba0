"""Which paths speak a dialect, and the chat behind a body of each."""

from collections.abc import Callable
from typing import Any

import msgspec

from fairlead_common.protocols import messages, responses
from fairlead_common.protocols.paths import COUNT_TOKENS, MESSAGES, RESPONSES

_RESPONSES = msgspec.json.Decoder(responses.ResponsesBody)
_MESSAGES = msgspec.json.Decoder(messages.MessagesBody)
_READERS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    RESPONSES: lambda raw: responses.chat_body(_RESPONSES.decode(raw)),
    MESSAGES: lambda raw: messages.chat_body(_MESSAGES.decode(raw)),
    COUNT_TOKENS: lambda raw: messages.chat_body(_MESSAGES.decode(raw)),
}


def needs_conversion(path: str) -> bool:
    return path in _READERS


def read_chat(path: str, raw: bytes) -> dict[str, Any]:
    """The body of the chat completion that asks for what `raw` asks for. Raises PromptError, or msgspec.DecodeError."""
    return _READERS[path](raw)
