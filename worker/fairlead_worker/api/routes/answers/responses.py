"""Responses and stream events of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from fairlead_worker.api.routes.answers.base import Answer, Json
from fairlead_worker.api.routes.answers.completions import TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Json]
    """Always empty."""
    logprobs: list[TokenLogprob]
    """With `include: [message.output_text.logprobs]` or `top_logprobs`."""


class ReasoningText(Answer):
    """Text of a reasoning item."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(Answer):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(Answer):
    """The reasoning before a message or a call."""

    type: Literal["reasoning"]
    id: str
    status: ItemStatus
    summary: list[Json]
    """Always empty."""
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """A call of a tool."""

    type: Literal["function_call"]
    id: str
    status: ItemStatus
    call_id: str
    """The id that `function_call_output` answers."""
    name: str
    arguments: str
    """JSON."""


OutputItem = Annotated[MessageItem | ReasoningItem | FunctionCallItem, Field(discriminator="type")]
ContentPart = Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class InputTokensDetails(Answer):
    """Parts of the input tokens."""

    cached_tokens: int
    """Input tokens whose KV came from the cache."""
    cache_write_tokens: int
    """Always 0."""


class OutputTokensDetails(Answer):
    """Parts of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Answer):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Answer):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class Response(Answer):
    """A response. Fields of the request that it does not list come back unchanged."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    parallel_tool_calls: bool
    reasoning: Json
    store: bool
    temperature: float
    top_p: float
    text: Json
    tool_choice: Any
    tools: list[Json]
    top_logprobs: int


class DeletedResponse(Answer):
    """A stored response is deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(Answer):
    """The whole conversation before a stored response on one page, the newest item first."""

    object: Literal["list"]
    data: list[Json]
    has_more: Literal[False]
    first_id: str | None = None
    last_id: str | None = None


class _Event(Answer):
    sequence_number: int
    """Counts the events of the stream from 0."""


class ResponseStateEvent(_Event):
    """The response as it is now. The last event of a stream is `completed`, `incomplete` or `failed`."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    response: Response


class OutputItemEvent(_Event):
    """An item starts or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(_Event):
    """A part of an item starts or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextDeltaEvent(_Event):
    """Text of a message, of reasoning, or of a call's arguments."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta", "response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    content_index: int | None = None
    """Absent for arguments."""
    delta: str
    logprobs: list[TokenLogprob] | None = None
    """Of a message's text."""


class TextDoneEvent(_Event):
    """The whole text of a message or of reasoning."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class ArgumentsDoneEvent(_Event):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class ErrorEvent(_Event):
    """The stream failed. `response.failed` follows."""

    type: Literal["error"]
    code: str | int | None = None
    message: str
    param: str | None = None


class ResponseStreamEvent(
    RootModel[
        Annotated[
            ResponseStateEvent | OutputItemEvent | ContentPartEvent | TextDeltaEvent | TextDoneEvent | ArgumentsDoneEvent | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """An event of a response's stream, under the name of its own type."""
