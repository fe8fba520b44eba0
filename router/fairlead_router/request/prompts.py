"""A request's body, read once: which model, which prompt, and the prompt's tokens and block hashes."""

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
import xxhash

from fairlead_common.memory import LARGE, trim_heap
from fairlead_common.prompts.chat_request import build_encode_kwargs
from fairlead_common.prompts.encoder import PromptError
from fairlead_common.protocols.chats import needs_conversion, read_chat
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, COUNT_TOKENS, EMBEDDINGS, MESSAGES, POOLED, RESPONSES
from fairlead_common.truncate import quoted
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.errors import ApiError
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.prompt_formats import KnownFormat, PromptFormats
from fairlead_router.request import pooling_prompts as pooled
from fairlead_router.request import validation as wrong
from fairlead_router.request.fair_lock import Turns
from fairlead_router.request.request_params import Asked
from fairlead_router.tenancy.tenants import ANYONE

_CHATS = (CHAT, RESPONSES, MESSAGES)
PROMPTED = (COMPLETIONS, *_CHATS, *POOLED)
"""Paths whose requests are for the engine."""
PASSED = ("/tokenize", "/detokenize", COUNT_TOKENS)
"""Paths whose requests need a worker, but no engine. They take quota and a place in the queue too: tokenizing costs seconds of CPU."""
_BYTES_A_TOKEN = 4
"""For prompts that are not tokenized here, a length good enough to compare waits."""
INLINE_BYTES = 1024
"""Bodies up to this size are read on the event loop: a thread's wake-up costs more than they do (0.1 ms to tokenize a thousand bytes)."""


class _Body(msgspec.Struct):
    """The fields that decide the prompt and the way. What is wrong with the others, or with the types of these, the worker says."""

    model: Any = None
    user: Any = None
    prompt: Any = None
    n: Any = None
    best_of: Any = None
    messages: Any = None
    tools: Any = None
    tool_choice: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
    documents: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None
    cache_salt: Any = None
    input: Any = None
    text_1: Any = None
    text_2: Any = None
    query: Any = None


class Prompt(msgspec.Struct, frozen=True):
    """What the router knows of a prompt. `tokens` only where the worker may take them instead of the text."""

    length: int = 0
    """Tokens; estimated from bytes where it was not tokenized."""
    hashes: Sequence[int] = msgspec.field(default_factory=lambda: array("Q"))
    tokens: "array[int] | None" = None
    format_tag: str = ""
    user: str = ""
    asked: Asked = Asked()
    salt: str = ""
    """Of the caller's tenant and its own `cache_salt`: part of the root of `hashes`, and for the worker to say the same."""
    model: str = ""
    """The name that a worker must answer to; empty where every worker does."""
    conversation: int = 0
    """The same for all requests of a conversation; 0 where nobody asked for it."""
    adapter: str = ""
    """Digest of the LoRA adapter that `hashes` are of; empty: none."""


def estimate(size: int, salt: str = "") -> Prompt:
    """Return what is known of a body of `size` bytes that is not tokenized here and generates nothing."""
    return Prompt(length=size // _BYTES_A_TOKEN, asked=Asked(output=0), salt=salt)


class Prompts:
    """Reads bodies in a pool of threads: a long prompt must not hold up the streams of others."""

    def __init__(
        self,
        formats: PromptFormats,
        threads: Executor,
        tokenize: bool,
        served_name: str = "",
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        canary_for: Callable[[int], str] | None = None,
    ) -> None:
        """`canary_for`: the revision to whose canaries a conversation goes, if any; None: there are no canaries here."""
        self._formats, self._threads, self._tokenize = formats, threads, tokenize
        self._served_name, self._adapters, self._canary_for = served_name, adapters, canary_for
        self._decoder = msgspec.json.Decoder(_Body)
        self._large = Turns()

    async def read(
        self, path: str, body: bytes, salt_of: Callable[[str], str] = ANYONE.salt, session: str = "", tenant: str = ""
    ) -> Prompt:
        """`salt_of`: the caller's salt, given the client's own. `session`: what the client calls the conversation, if it does.

        Large bodies go one after the other, tenants by turns: each takes up to 170 times its size for a moment, and seconds of a thread.
        Raises ApiError: 400 for what is not a JSON object, 404 for a model that no worker serves.
        """
        if len(body) <= INLINE_BYTES:
            return self._read(path, body, salt_of, session)
        loop = asyncio.get_running_loop()
        if len(body) <= LARGE:
            return await loop.run_in_executor(self._threads, self._read, path, body, salt_of, session)
        await self._large.take(tenant)
        reading = loop.run_in_executor(self._threads, self._read, path, body, salt_of, session)
        reading.add_done_callback(self._have_read)
        return await asyncio.shield(reading)  # the client may go, and the thread works on: so long it is nobody else's turn

    async def check(self, path: str, body: bytes) -> None:
        """Raises ApiError 400 for what every worker would refuse."""
        if len(body) <= INLINE_BYTES:
            wrong.check(path, body)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, wrong.check, path, body)

    def _have_read(self, reading: "asyncio.Future[Prompt]") -> None:
        """A large body: what that needed is given back, and its turn."""
        if not reading.cancelled():
            reading.exception()  # told to whoever still waits for it
            with contextlib.suppress(RuntimeError):  # the router ends, and its threads did
                asyncio.get_running_loop().run_in_executor(self._threads, trim_heap)
        self._large.give_back()

    def model_names(self) -> list[str]:
        return sorted({*self._formats.model_names(), *self._adapters(), self._served_name} - {""})

    def _read(self, path: str, raw: bytes, salt_of: Callable[[str], str], session: str) -> Prompt:
        try:
            body = self._body(path, raw)
        except wrong.DECODING as error:  # a number that no type here can hold, or no JSON object at all
            raise wrong.refusal(error) from None
        name = body.model if isinstance(body.model, str) else ""
        adapter = None if self._formats.knows(name) else self._adapter(body.model)
        model = name if adapter is not None or self._formats.divided_by(name) else ""
        user = body.user if isinstance(body.user, str) else ""
        asked = Asked.by(path, body)
        salt = salt_of(asked.salt)
        conversation = conversation_of(body.messages, body.prompt, session) if self._canary_for is not None else 0
        canary = self._canary_for(conversation) if self._canary_for is not None else ""
        guess = Prompt(len(raw) // _BYTES_A_TOKEN, user=user, asked=asked, salt=salt, model=model, conversation=conversation)
        known = self._formats.of_model(body.model, canary)
        if not self._tokenize or known is None:
            return guess
        most = known.format.max_model_len
        try:
            if path in POOLED:
                if path != EMBEDDINGS:
                    return guess  # of several texts, each of its own field
                tokens = pooled.tokens(body, lambda text: known.encoder.encode_text(text, scope=salt, most=most))
                return guess if tokens is None else msgspec.structs.replace(guess, length=len(tokens), tokens=tokens, format_tag=known.tag)
            tokens, alone = self._tokens(path, body, known, salt)
        except (PromptError, TypeError, ValueError, OverflowError, RecursionError):
            return guess  # the worker refuses it, in its own words
        if tokens is None:
            return guess
        digest = adapter.digest if adapter is not None else ""
        root = prompt_root(known.format, digest, salt) if digest or salt else known.root
        hashes = block_hashes(root, tokens, known.format.block_tokens)
        return Prompt(len(tokens), hashes, tokens if alone else None, known.tag, user, asked, salt, model, conversation, digest)

    def _body(self, path: str, raw: bytes) -> _Body:
        """The fields; of a dialect's body those of the chat that asks for the same. No messages where none can be made of it."""
        if not needs_conversion(path):
            return self._decoder.decode(raw)
        try:
            return msgspec.convert(read_chat(path, raw), _Body)
        except (msgspec.DecodeError, UnicodeDecodeError, PromptError, RecursionError):
            body = self._decoder.decode(raw)
            body.messages = body.prompt = None
            return body

    def _adapter(self, model: Any) -> Adapter | None:
        """The adapter of that name; None where it is not the workers' to know. Raises ApiError 404 for a name that nobody serves.

        Before the first worker was heard nobody knows what its adapters are called: a request may wait for it under any name.
        """
        if not isinstance(model, str):
            return None
        if (adapter := self._adapters().get(model)) is not None:
            return adapter
        names = self.model_names()
        if model in names or self._formats.current is None:
            return None
        message = f"The model {quoted(model)} does not exist. Models served here: {', '.join(names)}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def _tokens(self, path: str, body: _Body, known: KnownFormat, salt: str) -> "tuple[array[int] | None, bool]":
        """The (first) prompt's tokens, and whether they may stand for the whole prompt on the way to the worker.

        `salt` parts the tenants in the cache of tokens.
        """
        if body.truncate_prompt_tokens is not None:
            return None, False  # how much of it is left, the worker's context and the answer's length decide
        alone = body.n in (None, 1) and body.best_of in (None, 1)
        encoder, most = known.encoder, known.format.max_model_len
        if path in _CHATS:
            if body.chat_template is not None or body.documents is not None or body.messages is None:
                return None, False
            return encoder.encode_chat(**build_encode_kwargs(body), scope=salt, most=most), alone
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            alone = alone and len(prompt) == 1
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and bool not in set(map(type, prompt)):
            return array("I", prompt), alone
        if not isinstance(prompt, str) or not prompt:
            return None, False
        return encoder.encode_text(prompt, body.add_special_tokens is not False, salt, most), alone


def conversation_of(messages: Any, prompt: Any, session: str) -> int:
    """A number that all requests of a conversation have in common: of its session if the client names one, else of a chat's beginning.

    That is all up to the first message of a user: the beginning that chats have in common, and what sets them apart. Text has no such place
    (its first block may be the same in all prompts), so each prompt is a conversation of its own.
    """
    if session:
        told: Any = session
    elif isinstance(messages, list):
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        told = messages[: roles.index("user") + 1] if "user" in roles else messages
    else:
        told = prompt
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(told)) or 1
