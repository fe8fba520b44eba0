"""Answers and stream events of OpenAI's Responses API."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType, field

from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.errors import ErrorEvent
from fairlead_worker.api.answers.completions import TokenLogprob

Json = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer, tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Json] = field(default_factory=list)
    """Always empty."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """With `include: [message.output_text.logprobs]` or `top_logprobs`."""


class ReasoningText(Answer, tag="reasoning_text"):
    """Text of a reasoning item."""

    text: str


ContentPart = OutputText | ReasoningText


class MessageItem(Answer, kw_only=True, tag="message"):
    """A message of the model."""

    id: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = field(default_factory=list)
    status: ItemStatus = "in_progress"


class ReasoningItem(Answer, kw_only=True, tag="reasoning"):
    """The reasoning before a message or a call."""

    id: str
    summary: list[Json] = field(default_factory=list)
    """Always empty."""
    content: list[ReasoningText] = field(default_factory=list)
    status: ItemStatus = "in_progress"


class FunctionCallItem(Answer, kw_only=True, tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    """The id that `function_call_output` answers."""
    name: str
    arguments: str = ""
    """JSON."""
    namespace: str | UnsetType = UNSET
    """Of a tool in a `namespace`."""
    status: ItemStatus = "in_progress"


class CustomCallItem(Answer, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, whose input is a text."""

    id: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET
    """Of a tool in a `namespace`."""
    status: ItemStatus = "in_progress"


class ShellAction(Answer, kw_only=True, tag="exec"):
    """A command of a shell."""

    command: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Always empty."""
    user: None = None
    timeout_ms: Any = None
    working_directory: Any = None


class ShellCallItem(Answer, kw_only=True, tag="local_shell_call"):
    """A call of the client's shell."""

    id: str
    call_id: str
    action: ShellAction
    status: ItemStatus = "in_progress"


class ToolSearchItem(Answer, kw_only=True, tag="tool_search_call"):
    """A search for tools, which the client makes."""

    id: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Json = field(default_factory=dict)
    status: ItemStatus = "in_progress"


ToolCallItem = FunctionCallItem | CustomCallItem | ShellCallItem | ToolSearchItem
OutputItem = MessageItem | ReasoningItem | ToolCallItem


class InputTokensDetails(Answer):
    """Parts of the input tokens."""

    cached_tokens: int
    """Input tokens whose KV came from the cache."""
    cache_write_tokens: int = 0
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

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(Answer, kw_only=True):
    """A response, with fields of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time in seconds."""
    completed_at: int | None = None
    """Unix time in seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Json
    store: bool
    """Whether it is stored."""
    background: Literal[False] = False
    service_tier: Literal["default"] = "default"
    """There is one tier."""
    temperature: float
    top_p: float
    text: Json
    tool_choice: Any
    tools: list[Json]
    top_logprobs: int
    truncation: Literal["disabled"] = "disabled"
    """Nothing is truncated."""
    usage: ResponseUsage | None = None
    """Null until the end."""
    instructions: str | None
    metadata: dict[str, str] | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None


class DeletedResponse(Answer):
    """A stored response is deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Answer, kw_only=True, tag_field="object", tag="list"):
    """The whole conversation before a stored response on one page, the newest item first."""

    data: list[Json]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class StreamEvent(Answer, kw_only=True):
    """An event of a response's stream."""

    sequence_number: int = 0
    """Counts events from 0."""


class ResponseStateEvent(StreamEvent):
    """The response as it is now. The last event of a stream is `completed`, `incomplete` or `failed`."""

    type: Literal["response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"]
    response: Response


class OutputItemEvent(StreamEvent):
    """An item starts or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(StreamEvent):
    """A part of an item starts or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: ContentPart


class TextDeltaEvent(StreamEvent):
    """Text of a message or of reasoning."""

    type: Literal["response.output_text.delta", "response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    """Of a message's text."""


class TextDoneEvent(StreamEvent):
    """The whole text of a message or of reasoning."""

    type: Literal["response.output_text.done", "response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    """Of a message's text."""


class CallDeltaEvent(StreamEvent):
    """Text of a call's arguments, or of a custom tool's input."""

    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(StreamEvent, kw_only=True):
    """The whole arguments of a call."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDoneEvent(StreamEvent, kw_only=True):
    """The whole input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"] = "response.custom_tool_call_input.done"
    item_id: str
    output_index: int
    input: str


CallEvent = CallDeltaEvent | ArgumentsDoneEvent | InputDoneEvent
ItemEvent = OutputItemEvent | ContentPartEvent | TextDeltaEvent | TextDoneEvent | CallEvent
ResponseStreamEvent = ResponseStateEvent | ItemEvent | ErrorEvent
