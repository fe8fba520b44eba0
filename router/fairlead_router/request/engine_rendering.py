"""Chats that another engine renders otherwise than this router: the engine's `/tokenize` decides on their tokens.

An engine has its own ways of rendering: of lists of content parts, of tools with `tool_choice` "none", of a template from its flags. So one
chat of each shape is compared beside its request, which does not wait. Where the tokens differ, later chats of that shape are routed by the
engine's tokens, from a cache. The client's body goes to the engine unchanged in any case.
"""

import asyncio
import logging
from array import array
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from fairlead_common.memory import LARGE
from fairlead_common.prompts.token_cache import Key, TokenCache
from fairlead_router.fleet.workers import Worker, WorkerTable
from fairlead_router.request.body import RenderedFields
from fairlead_router.request.prompts import THREAD_OBJECTS, Prompt, Prompts
from fairlead_router.supervision import stop_tasks
from fairlead_router.wire.upstream import UpstreamError

logger = logging.getLogger(__name__)

TOKENIZE_SECONDS: Final = 1.0
CACHE_BYTES: Final = 16 << 20
MAX_SHAPES: Final = 256
"""Beyond it, all are compared again."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class EngineRendering:
    """Owner of the comparisons and of the cache."""

    def __init__(self, table: WorkerTable, prompts: Prompts) -> None:
        self._table, self._prompts = table, prompts
        self._cache = TokenCache(CACHE_BYTES)
        self._agrees: dict[tuple[str, str], bool] = {}
        """Whether the engine has this router's tokens, by format and shape; also true while it is not known."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def correct(self, body: bytes, prompt: Prompt) -> Prompt:
        """Return a chat's prompt with the engines' own tokens, where they are known to differ."""
        if (
            prompt.tokens is None
            or prompt.params.size.objects > THREAD_OBJECTS
            or len(body) > LARGE
            or not (engines := list(self._engines(prompt)))
        ):
            return prompt
        chat = msgspec.json.decode(body, type=RenderedFields)
        shape, request = _shape(chat), _tokenize_body(chat)
        for worker in engines:
            key = (worker.format_tag, shape)
            agrees = self._agrees.get(key)
            if agrees is None:
                if len(self._agrees) >= MAX_SHAPES:
                    self._agrees.clear()
                self._agrees[key] = True
                task = asyncio.create_task(self._compare(worker, key, request, prompt))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif not agrees and (tokens := await self._tokenize(worker, request, prompt.salt)) is not None:
                prompt = self._prompts.with_tokens(prompt, worker.format_tag, tokens)
        return prompt

    async def close(self) -> None:
        await stop_tasks(*self._tasks)

    def _engines(self, prompt: Prompt) -> Iterator[Worker]:
        """Yield a worker of each format of the prompt that another engine has."""
        tags = {prompt.format_tag, *prompt.other_hashes}
        for worker in self._table.engines():
            if worker.usable and worker.format_tag in tags:
                tags.discard(worker.format_tag)
                yield worker

    async def _compare(self, worker: Worker, key: tuple[str, str], request: bytes, prompt: Prompt) -> None:
        try:
            tokens = await self._fetch(worker, request)
        except (UpstreamError, TimeoutError):
            self._agrees.pop(key, None)  # the next chat of this shape is compared
            return
        if tokens is not None and tokens != prompt.tokens:
            self._agrees[key] = False
            logger.info("%s renders chats like this one otherwise (%s): its /tokenize decides on their tokens", worker.runtime, key[1])

    async def _tokenize(self, worker: Worker, request: bytes, salt: str) -> "array[int] | None":
        """Return the engine's tokens; None if it does not answer in time: then this router's serve."""
        key = Key(worker.format_tag, salt, request.decode())
        (tokens,) = self._cache.get([key])
        if tokens is None:
            try:
                tokens = await self._fetch(worker, request)
            except (UpstreamError, TimeoutError):
                return None
            if tokens is not None:
                self._cache.put(key, tokens)
        return tokens

    async def _fetch(self, worker: Worker, request: bytes) -> "array[int] | None":
        """Return the engine's tokens of a chat; None if its /tokenize takes no chats. Raises UpstreamError, TimeoutError."""
        head, body = await worker.pool.fetch(
            "/tokenize", TOKENIZE_SECONDS, {"content-type": "application/json"}, method="POST", body=request
        )
        try:
            return array("I", msgspec.json.decode(body, type=_Tokenized).tokens) if head.status == 200 else None
        except (msgspec.MsgspecError, OverflowError):
            return None


def _tokenize_body(chat: RenderedFields) -> bytes:
    """Return the body of vLLM's `/tokenize` for a chat."""
    kwargs = chat.chat_template_kwargs
    if chat.reasoning_effort is not None and isinstance(kwargs, dict | None):
        kwargs = {"reasoning_effort": chat.reasoning_effort, **(kwargs or {})}
    fields = {"model": chat.model, "messages": chat.messages, "tools": chat.tools, "chat_template_kwargs": kwargs}
    fields |= {"add_generation_prompt": chat.add_generation_prompt, "continue_final_message": chat.continue_final_message}
    if chat.continue_final_message and chat.add_generation_prompt is None:
        fields["add_generation_prompt"] = False
    return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})


def _shape(chat: RenderedFields) -> str:
    """Return what a chat consists of, without its text: chats of one shape are rendered by the same parts of a template."""
    messages = chat.messages if isinstance(chat.messages, list) else []
    kinds = {_kind(message) for message in messages if isinstance(message, dict)}
    kwargs = sorted(map(str, chat.chat_template_kwargs)) if isinstance(chat.chat_template_kwargs, dict) else []
    flags = {
        "tools": bool(chat.tools),
        "tool_choice=none": chat.tool_choice == "none",
        "add_generation_prompt=false": chat.add_generation_prompt is False,
        "continue_final_message": bool(chat.continue_final_message),
        "reasoning_effort": chat.reasoning_effort is not None,
    }
    return ", ".join([*sorted(kinds), *(name for name, is_set in flags.items() if is_set), *kwargs])[:512]


def _kind(message: dict[str, Any]) -> str:
    content = message.get("content")
    kind = type(content).__name__
    if isinstance(content, list):
        kind = "+".join(sorted({str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}))
    others = sorted(str(name) for name, value in message.items() if name not in ("role", "content") and value)
    return " ".join([str(message.get("role")), kind, *others])
