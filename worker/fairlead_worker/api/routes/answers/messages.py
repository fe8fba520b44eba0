"""Responses and stream events of Anthropic's Messages API."""

from typing import Annotated, Literal

from pydantic import Field, RootModel

from fairlead_worker.api.routes.answers.base import Answer, Json, MessagesError


class TextBlock(Answer):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """The model's reasoning."""

    type: Literal["thinking"]
    thinking: str
    """Empty with `thinking.display: omitted`."""
    signature: str
    """Always empty."""


class ToolUseBlock(Answer):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    """The arguments; empty at the start of a stream's block."""


ContentBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]


class MessageUsage(Answer):
    """Tokens of a message. Anthropic counts cached input tokens separately from the rest of the input."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    """Always 0."""
    output_tokens: int


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    """Null in `message_start`."""
    stop_sequence: str | None = None
    """The stop sequence that ended the message."""


class Message(MessageEnd):
    """An answer to messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


class MessageTokens(Answer):
    """Tokens of a prompt."""

    input_tokens: int


class MessageStartEvent(Answer):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: Message


class BlockStartEvent(Answer):
    """A block starts."""

    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(Answer):
    """Text of a message."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    """Text of the reasoning."""

    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Answer):
    """A part of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDeltaEvent(Answer):
    """A part of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | ThinkingDelta | InputJsonDelta, Field(discriminator="type")]


class BlockStopEvent(Answer):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


class MessageDeltaEvent(Answer):
    """How the message ended."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(Answer):
    """The last event of a stream."""

    type: Literal["message_stop"]


class PingEvent(Answer):
    """The request waits."""

    type: Literal["ping"]


class MessageStreamEvent(
    RootModel[
        Annotated[
            MessageStartEvent
            | BlockStartEvent
            | BlockDeltaEvent
            | BlockStopEvent
            | MessageDeltaEvent
            | MessageStopEvent
            | PingEvent
            | MessagesError,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a message's stream, under the name of its own type."""
