"""`POST /v1/chat/completions`."""

from array import array
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from msgspec import UNSET, UnsetType

from fairlead_common.prompts.chat_request import build_encode_kwargs
from fairlead_common.prompts.encoder import PromptEncoder
from fairlead_worker.api.answers.completions import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    CustomCall,
    FunctionCall,
    ToolCall,
)
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.generation.choice import Choice, OutputDelta
from fairlead_worker.api.generation.logprobs import format_chat_logprobs, format_prompt_logprobs
from fairlead_worker.api.generation.prepare import GenerationRequest, check_generates, prepare, resolve_sampling
from fairlead_worker.api.generation.sampling import GenerationOptions, read_options
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.openai.streaming import ChunkWriter
from fairlead_worker.api.output.custom_input import CustomInput, read_input
from fairlead_worker.api.output.tool_choice import ToolUse, parse_tool_use
from fairlead_worker.api.replies import send_answer
from fairlead_worker.api.router_headers import read_origin
from fairlead_worker.api.schema import ChatRequest, parse
from fairlead_worker.api.tokenize import check_chat_template, read_tokenized_body
from fairlead_worker.api.worker import Worker
from fairlead_worker.parsing.events import CallArguments, CallStart, Event, Reasoning, Text, gather


class ChatFormatter:
    """Builds the JSON of chat completions."""

    chunk_type = ChatCompletionChunk
    whole_type = ChatCompletion

    def __init__(
        self, id: str, encoder: PromptEncoder, generation_request: GenerationRequest, request: ChatRequest, tool_use: ToolUse
    ) -> None:
        self.id = f"chatcmpl-{id}"
        self._encoder = encoder
        self._generation_request = generation_request
        self._reasoning, self._echo = request.include_reasoning is not False, _echo(request)
        self._may_call, self._custom = bool(tool_use.functions), tool_use.custom_names
        self._inputs: dict[tuple[int, int], CustomInput] = {}
        """Inputs of the custom tools that a stream calls, by choice and call."""
        self._no_reasoning = None if generation_request.choices[0].reasoning_tokens is not None else UNSET
        """Reasoning of a delta without it. OpenAI's SDK raises AttributeError for a field that it does not know and that is left out."""

    def first_chunk(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, self._delta(role="assistant", content=self._echo or (None if self._may_call else "")))

    def chunks(self, index: int, delta: OutputDelta) -> list[ChatChunkChoice]:
        logprobs = self._logprobs(delta)
        shown = [ChatChunkChoice(index, part) for event in self._events(delta) if (part := self._show(index, event)) is not None]
        if logprobs is not None or (delta.tokens and self._generation_request.options.return_token_ids):
            shown = shown or [ChatChunkChoice(index, self._delta())]
            shown[0].logprobs = logprobs
        return shown

    def last_chunk(self, index: int, choice: Choice) -> ChatChunkChoice:
        delta = self._delta(tool_calls=self._finish_inputs(index) or UNSET) if self._inputs else self._delta()
        return ChatChunkChoice(index, delta, None, choice.client_finish_reason, choice.stop_reason)

    def _finish_inputs(self, index: int) -> list[ToolCall]:
        """Return the rest of the inputs of a choice's custom tools."""
        rest = [(call, custom.finish()) for (at, call), custom in self._inputs.items() if at == index]
        return [ToolCall(index=call, custom=CustomCall(input=text)) for call, text in rest if text]

    def full_choice(self, index: int, choice: Choice, delta: OutputDelta) -> ChatChoice:
        message = _message(self._echo, self._events(delta), self._custom)
        reason, stop = choice.client_finish_reason, choice.stop_reason
        return ChatChoice(index, message, self._logprobs(delta), finish_reason=reason, stop_reason=stop)

    def _show(self, index: int, event: Event) -> ChatDelta | None:
        """Return the delta that shows an event; None for arguments of a custom tool that add nothing to its input yet."""
        match event:
            case Text(text):
                return self._delta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text, reasoning_content=text)
            case CallStart(call, id, name):
                if name in self._custom:
                    self._inputs[index, call] = CustomInput()
                return self._delta(tool_calls=[_call(id, name, "", name in self._custom, call)])
            case CallArguments(call, text):
                if (custom := self._inputs.get((index, call))) is None:
                    return self._delta(tool_calls=[ToolCall(index=call, function=FunctionCall(arguments=text))])
                text = custom.add(text)
                return self._delta(tool_calls=[ToolCall(index=call, custom=CustomCall(input=text))]) if text else None

    def _delta(self, **fields: Any) -> ChatDelta:
        return ChatDelta(reasoning=self._no_reasoning, reasoning_content=self._no_reasoning, **fields)

    def _events(self, delta: OutputDelta) -> list[Event]:
        return delta.events if self._reasoning else [event for event in delta.events if not isinstance(event, Reasoning)]

    def extra_fields(self) -> dict[str, Any]:
        """Return the prompt's log-probabilities and token ids, which vLLM puts beside the choices."""
        generation_request, prompt = self._generation_request, self._generation_request.prompts[0]
        scores = (
            format_prompt_logprobs(self._encoder, prompt, generation_request.get_prompt_logprobs(0))
            if generation_request.needs_prompt_logprobs
            else None
        )
        tokens = prompt.tolist() if generation_request.options.return_token_ids else None
        return {"prompt_logprobs": scores, "prompt_token_ids": tokens}

    def _logprobs(self, delta: OutputDelta) -> ChatLogprobs | None:
        return format_chat_logprobs(self._encoder, delta, self._generation_request.options.tokens_as_token_ids)


async def chat_completions(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, body = await read_tokenized_body(worker, context)
    request = parse(body, ChatRequest)
    async with prepare_chat(worker, context, request, prompt_tokens, len(body)) as (model, generation_request, tool_use):
        formatter = ChatFormatter(request.request_id or context.request_id, worker.encoder, generation_request, request, tool_use)
        writer = ChunkWriter(worker, request, model, formatter, generation_request)
        await send_answer(context, worker, generation_request, writer, stream=bool(request.stream))


async def check_chat(
    worker: Worker, context: RequestContext, request: ChatRequest, prompt_tokens: "array[int] | None", size: int, bounded: bool = True
) -> "tuple[array[int], GenerationOptions, ToolUse]":
    """Return the prompt of a valid chat, its sampling and its tool rules. Only the context length is not checked yet.

    `prompt_tokens`: the prompt's token ids if the router has tokenized it. `size`: bytes of the body. `bounded`: refuse a prompt that is
    certainly too long before it is tokenized. Raises ApiError 400.
    """
    check_generates(worker)
    check_chat_template(worker, request.chat_template, request.chat_template_kwargs)
    origin = read_origin(context, request.cache_salt, request.priority, request.user)
    options = read_options(request, worker.ready.sampling_defaults, *origin)
    tool_use = parse_tool_use(request)
    is_bounded = bounded and options.truncate_prompt_tokens is None
    most = worker.max_model_len if is_bounded else worker.max_countable_tokens
    if prompt_tokens is not None:
        prompt = prompt_tokens
    elif request.messages is None:
        raise invalid("messages: is missing; give a list of messages", param="messages")
    else:  # refused before tokenizing if the prompt certainly has more than `most` tokens
        prompt = await worker.encode(
            lambda: worker.encoder.encode_chat(**build_encode_kwargs(request), scope=options.salt, max_tokens=most), size, context.cpu
        )
    constraint = worker.output_parsers.build_constraint(options.constraint, tool_use, prompt)
    if constraint is not None:
        grammar = await context.while_connected(worker.compile_grammar(constraint, options.tenant, context.cpu.add))
        options = replace(options, constraint=constraint, grammar=grammar)
    return prompt, options, tool_use


@asynccontextmanager
async def prepare_chat(
    worker: Worker,
    context: RequestContext,
    request: ChatRequest,
    prompt_tokens: "array[int] | None",
    size: int,
    ends_at_context: bool = False,
) -> "AsyncIterator[tuple[str, GenerationRequest, ToolUse]]":
    """Build the engine request of a chat, from any of the APIs. Yield the model name, the request and the tool rules.

    The adapter is held until the context ends. `prompt_tokens` and `size` are as in `check_chat`, `ends_at_context` as in `prepare`.
    """
    model = worker.check_model(request.model)
    with worker.adapters.use(model) as adapter:
        prompt, options, tool_use = await check_chat(worker, context, request, prompt_tokens, size)
        parsers = worker.output_parsers.build_parser_factory(options.constraint, tool_use, prompt)
        yield model, prepare(worker, [prompt], options, adapter, parsers, "messages", ends_at_context), tool_use


async def count_chat_tokens(worker: Worker, context: RequestContext, request: ChatRequest, size: int) -> int:
    """Return the number of prompt tokens of a chat, without a limit. Raise ApiError if generation would refuse it for another reason."""
    worker.check_model(request.model)
    prompt, options, _ = await check_chat(worker, context, request, None, size, bounded=False)
    resolve_sampling(worker, options)
    worker.check_tokens(prompt, "messages")
    return len(prompt)


def _echo(request: ChatRequest) -> str:
    """Return the text for vLLM's `echo`: the last message, if the answer has the same role."""
    last = request.messages[-1] if request.echo and request.messages else {}
    speaks = "assistant" if request.add_generation_prompt is not False and not request.continue_final_message else last.get("role")
    content = last.get("content")
    if last.get("role") != speaks or not isinstance(content, str | list):
        return ""
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content if isinstance(part, dict)]
    return "\n".join(part for part in parts if isinstance(part, str))


def _message(echo: str, events: list[Event], custom: Collection[str]) -> AssistantMessage:
    """Return the message of a whole answer, prefixed with `echo`. The content is null if the answer consists of calls only."""
    whole = gather(events)
    calls = [
        _call(call.id, call.name, read_input(call.arguments) if call.name in custom else call.arguments, call.name in custom)
        for call in whole.calls
    ]
    content, reasoning = echo + whole.text or (None if calls else ""), whole.reasoning or None
    return AssistantMessage(content=content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or UNSET)


def _call(id: str, name: str, text: str, is_custom: bool, index: int | UnsetType = UNSET) -> ToolCall:
    """Return a call. `text`: its arguments, or the input of a custom tool."""
    if is_custom:
        return ToolCall(index=index, id=id, type="custom", custom=CustomCall(name=name, input=text))
    return ToolCall(index=index, id=id, type="function", function=FunctionCall(name=name, arguments=text))
