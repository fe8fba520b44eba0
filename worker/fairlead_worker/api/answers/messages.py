"""Answers and stream events of Anthropic's Messages API."""

from typing import Any, Literal

from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.errors import MessagesError

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(Answer, tag="text"):
    """Text of a message."""

    text: str = ""


class ThinkingBlock(Answer, tag="thinking"):
    """The model's reasoning."""

    thinking: str = ""
    """Empty with `thinking.display: omitted`."""
    signature: str = ""
    """Always empty: only the service that signs thinking can verify a signature. None is required either."""


class ToolUseBlock(Answer, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    """The arguments; empty at the start of a stream's block."""


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Answer, kw_only=True):
    """Tokens of a message. Anthropic counts cached input tokens separately from the rest of the input."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    """Always 0."""
    output_tokens: int


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None
    """The stop sequence that ended the message."""


class Message(Answer, kw_only=True):
    """An answer to messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None = None
    """Null in `message_start`."""
    stop_sequence: str | None = None
    """The stop sequence that ended the message."""
    usage: MessageUsage


class MessageTokens(Answer):
    """Tokens of a prompt."""

    input_tokens: int


class MessageStartEvent(Answer, tag="message_start"):
    """The first event of a stream."""

    message: Message


class BlockStartEvent(Answer, tag="content_block_start"):
    """A block starts."""

    index: int
    content_block: ContentBlock


class TextDelta(Answer, tag="text_delta"):
    """Text of a message."""

    text: str


class ThinkingDelta(Answer, tag="thinking_delta"):
    """Text of the reasoning."""

    thinking: str


class InputJsonDelta(Answer, tag="input_json_delta"):
    """A part of a call's arguments."""

    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | InputJsonDelta


class BlockDeltaEvent(Answer, tag="content_block_delta"):
    """A part of a block."""

    index: int
    delta: BlockDelta


class BlockStopEvent(Answer, tag="content_block_stop"):
    """A block is complete."""

    index: int


class MessageDeltaEvent(Answer, tag="message_delta"):
    """How the message ended."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(Answer, tag="message_stop"):
    """The last event of a stream."""


class PingEvent(Answer, tag="ping"):
    """The request waits."""


BlockEvent = BlockStartEvent | BlockDeltaEvent | BlockStopEvent
MessageStreamEvent = MessageStartEvent | BlockEvent | MessageDeltaEvent | MessageStopEvent | PingEvent | MessagesError
