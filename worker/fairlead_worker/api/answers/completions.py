"""Answers of OpenAI's completions and chat completions."""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from fairlead_common.protocols.answer import Answer

FinishReason = Literal["stop", "length", "tool_calls"]
PromptLogprobs = list[dict[str, Any] | None]


class PromptTokensDetails(Answer):
    """Parts of the prompt tokens."""

    cached_tokens: int
    """Prompt tokens whose KV came from the cache."""


class CompletionTokensDetails(Answer):
    """Parts of the generated tokens."""

    reasoning_tokens: int
    """Generated tokens of the reasoning."""


class Usage(Answer, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Present for models with a reasoning parser."""

    @property
    def cached_tokens(self) -> int:
        return self.prompt_tokens_details.cached_tokens


class CompletionLogprobs(Answer):
    """Log-probabilities of tokens, in lists of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """-9999 stands for minus infinity, and null for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters before each token."""


class CompletionChoice(Answer):
    """One of the answers, or a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    """`stop` or `length`. Null in a stream until the last chunk of the choice."""
    stop_reason: str | int | None = None
    """vLLM: the stop string or the stop token that ended the answer."""
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    """vLLM: with `prompt_logprobs`."""
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    """vLLM: with `return_token_ids`."""
    token_ids: list[int] | UnsetType | None = UNSET
    """vLLM: with `return_token_ids`."""


class Completion(Answer, kw_only=True):
    """A text completion. Events of its stream have the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str | None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    """In a stream: null, or absent without `stream_options.include_usage`, except for the last chunk, which has no choices."""


class FunctionCall(Answer, kw_only=True):
    """A function and its arguments."""

    name: str | UnsetType = UNSET
    """Absent in the chunks after the first one of a call."""
    arguments: str
    """JSON, or a part of it in a stream."""


class CustomCall(Answer, kw_only=True):
    """A custom tool and its input."""

    name: str | UnsetType = UNSET
    """Absent in the chunks after the first one of a call."""
    input: str


class ToolCall(Answer, kw_only=True):
    """A call of a tool, or a part of one."""

    index: int | UnsetType = UNSET
    """In a stream: the number of the call."""
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionCall | UnsetType = UNSET
    custom: CustomCall | UnsetType = UNSET
    """In place of `function`, for a custom tool."""


class TopLogprob(Answer):
    """A token that was likely at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(Answer):
    """The token that was chosen at a position."""

    token: str
    bytes: list[int]
    """The bytes of the token, which can be a part of a character."""
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of the tokens of a choice, or of a chunk."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(Answer, kw_only=True):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Null if the answer consists of calls only."""
    refusal: None = None
    reasoning: str | None
    """vLLM: the reasoning of a model with a reasoning parser."""
    reasoning_content: str | None
    """The same as `reasoning`, under its former name."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Answer):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string or the stop token that ended the answer."""


class ChatCompletion(Answer, kw_only=True):
    """An answer to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str | None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    """vLLM: with `prompt_logprobs`."""
    prompt_token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""


class ChatDelta(Answer, kw_only=True):
    """What a chunk adds to its choice's message."""

    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    role: Literal["assistant"] | UnsetType = UNSET
    """In the first chunk of a choice."""
    content: str | UnsetType | None = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    """A part of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Null until the last chunk of the choice."""
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """An event of a chat's stream. `data: [DONE]` follows the last one, and an error takes the place of both."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[ChatChunkChoice]
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    usage: Usage | UnsetType | None = UNSET
    """Null, or absent without `stream_options.include_usage`, except for the last chunk, which has no choices."""
