"""Responses of OpenAI's completions and chat completions."""

from typing import Literal

from fairlead_worker.api.routes.answers.base import Answer, Json

FinishReason = Literal["stop", "length", "tool_calls"]
PromptLogprobs = list[Json | None]


class PromptTokensDetails(Answer):
    """Parts of the prompt tokens."""

    cached_tokens: int
    """Prompt tokens whose KV came from the cache."""


class CompletionTokensDetails(Answer):
    """Parts of the generated tokens."""

    reasoning_tokens: int
    """Generated tokens of the reasoning."""


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | None = None
    """Absent for requests that generate nothing."""
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    """Present for models with a reasoning parser."""


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
    finish_reason: FinishReason | None = None
    """Null in a stream until the last chunk of the choice."""
    stop_reason: str | int | None = None
    """vLLM: the stop string or the stop token that ended the answer."""
    prompt_logprobs: PromptLogprobs | None = None
    """vLLM: with `prompt_logprobs`."""
    prompt_token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""
    token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""


class Completion(Answer):
    """A text completion. Events of its stream have the same form."""

    id: str
    object: Literal["text_completion"]
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str | None = None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[CompletionChoice]
    usage: Usage | None = None
    """In a stream: null, or absent without `stream_options.include_usage`, except for the last chunk, which has no choices."""


class FunctionCall(Answer):
    """A function and its arguments."""

    name: str | None = None
    """Absent in the chunks after the first one of a call."""
    arguments: str
    """JSON, or a part of it in a stream."""


class ToolCall(Answer):
    """A call of a tool, or a part of one."""

    index: int | None = None
    """In a stream: the number of the call."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class TopLogprob(Answer):
    """A token that was likely at a position."""

    token: str
    bytes: list[int] | None = None
    logprob: float


class TokenLogprob(Answer):
    """The token that was chosen at a position."""

    token: str
    bytes: list[int] | None = None
    """The bytes of the token, which can be a part of a character."""
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """Log-probabilities of the tokens of a choice, or of a chunk."""

    content: list[TokenLogprob] | None = None
    refusal: None = None


class AssistantMessage(Answer):
    """The model's message."""

    role: Literal["assistant"]
    content: str | None = None
    """Null if the answer consists of calls only."""
    refusal: str | None = None
    reasoning: str | None = None
    """vLLM: the reasoning of a model with a reasoning parser."""
    reasoning_content: str | None = None
    """The same as `reasoning`, under its former name."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """vLLM: the stop string or the stop token that ended the answer."""
    token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""


class ChatCompletion(Answer):
    """An answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str | None = None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    """vLLM: with `prompt_logprobs`."""
    prompt_token_ids: list[int] | None = None
    """vLLM: with `return_token_ids`."""


class ChatDelta(Answer):
    """What a chunk adds to its choice's message."""

    role: Literal["assistant"] | None = None
    """In the first chunk of a choice."""
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(Answer):
    """A part of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    """Null until the last chunk of the choice."""
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Answer):
    """An event of a chat's stream. `data: [DONE]` follows the last one, and an error takes the place of both."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None = None
    """Changes with whatever can change the answer of an equal request."""
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    """Null, or absent without `stream_options.include_usage`, except for the last chunk, which has no choices."""
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
