"""Parsing of request bodies: the model, the prompt, and the prompt's tokens and block hashes."""

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
from fairlead_common.truncate import quote
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.errors import ApiError
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.prompt_formats import KnownFormat, PromptFormats
from fairlead_router.request import pooling_prompts, validation
from fairlead_router.request.fair_lock import FairLock
from fairlead_router.request.request_params import RequestParams
from fairlead_router.tenancy.tenants import ANONYMOUS

_CHATS = (CHAT, RESPONSES, MESSAGES)
PROMPTED = (COMPLETIONS, *_CHATS, *POOLED)
"""Paths whose requests the engine computes."""
UNPROMPTED = ("/tokenize", "/detokenize", COUNT_TOKENS)
"""Paths whose requests need a worker but not its engine. Quota and queue apply to them too: tokenizing can cost seconds of CPU."""
_BYTES_A_TOKEN = 4
"""Estimate for prompts that are not tokenized here; it only serves to compare waiting times."""
INLINE_BYTES = 1024
"""Bodies up to this size are parsed on the event loop: waking a thread costs more (0.1 ms to tokenize a thousand bytes)."""


class _Body(msgspec.Struct):
    """Fields that determine the prompt and the routing. The worker validates the others, and the types of these."""

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
    previous_response_id: Any = None
    input: Any = None
    text_1: Any = None
    text_2: Any = None
    data_1: Any = None
    data_2: Any = None
    query: Any = None
    queries: Any = None
    items: Any = None


class Prompt(msgspec.Struct, frozen=True):
    """The router's knowledge of a prompt. `tokens` is set only where the worker may use them instead of the text."""

    length: int = 0
    """Number of tokens; estimated from bytes if the prompt was not tokenized."""
    hashes: Sequence[int] = msgspec.field(default_factory=lambda: array("Q"))
    tokens: "array[int] | None" = None
    format_tag: str = ""
    user: str = ""
    params: RequestParams = RequestParams()
    salt: str = ""
    """Salt of the tenant and the client's `cache_salt`. It is part of the root of `hashes`, and the worker gets it in a header."""
    model: str = ""
    """Model name that the worker must serve; empty where every worker does."""
    conversation: int = 0
    """Number that all requests of a conversation share; 0 where it was not computed."""
    adapter: str = ""
    """Digest of the LoRA adapter that `hashes` belong to; empty: none."""
    other_hashes: Mapping[str, Sequence[int]] = msgspec.field(default_factory=dict)
    """Block hashes of the same tokens in other formats of the workers, by tag."""
    engine_tokens: "Mapping[str, array[int]]" = msgspec.field(default_factory=dict)
    """Tokens in formats whose engine renders the chat otherwise, by tag. Its agent counts with them, and the engine gets the text."""

    def tokens_for(self, tag: str) -> "array[int] | None":
        """Return the token ids that a worker with this format gets beside the text; None: they are not known."""
        if (tokens := self.engine_tokens.get(tag)) is not None:
            return tokens
        return self.tokens if tag in (self.format_tag, *self.other_hashes) else None


def estimate_prompt(size: int, salt: str = "") -> Prompt:
    """Return the estimate for a body of `size` bytes that is not tokenized here and generates nothing."""
    return Prompt(length=size // _BYTES_A_TOKEN, params=RequestParams(max_output=0), salt=salt)


class Prompts:
    """Parser of request bodies in a thread pool, so that a long prompt does not stall other requests' streams."""

    def __init__(
        self,
        formats: PromptFormats,
        threads: Executor,
        tokenize: bool,
        served_name: str = "",
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        canary_for: Callable[[int], str] | None = None,
    ) -> None:
        """`canary_for`: returns the revision whose canaries a conversation goes to, if any; None without canaries."""
        self._formats, self._threads, self._tokenize = formats, threads, tokenize
        self._served_name, self._adapters, self._canary_for = served_name, adapters, canary_for
        self._decoder = msgspec.json.Decoder(_Body)
        self._large_body_lock = FairLock()

    async def read(
        self, path: str, body: bytes, salt_of: Callable[[str], str] = ANONYMOUS.salt, session: str = "", tenant: str = ""
    ) -> Prompt:
        """Parse a body. `salt_of`: returns the caller's salt, given the client's own. `session`: the client's name of the conversation.

        Large bodies are parsed one at a time, fairly between tenants: each briefly takes up to 170 times its size, and seconds of a thread.
        Raises ApiError: 400 for a body that is not a JSON object, 404 for a model that no worker serves.
        """
        if len(body) <= INLINE_BYTES:
            return self._read(path, body, salt_of, session)
        loop = asyncio.get_running_loop()
        if len(body) <= LARGE:
            return await loop.run_in_executor(self._threads, self._read, path, body, salt_of, session)
        await self._large_body_lock.acquire(tenant)
        reading = loop.run_in_executor(self._threads, self._read, path, body, salt_of, session)
        reading.add_done_callback(self._finish_large_read)
        return await asyncio.shield(reading)  # if the client disconnects, the lock is held until the thread ends

    async def validate(self, path: str, body: bytes) -> None:
        """Raise ApiError 400 for a body that every worker would refuse."""
        if len(body) <= INLINE_BYTES:
            validation.check(path, body)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, validation.check, path, body)

    def _finish_large_read(self, reading: "asyncio.Future[Prompt]") -> None:
        """Release the memory that a large body needed, and the lock."""
        if not reading.cancelled():
            reading.exception()  # marks it as retrieved; a caller that still waits gets it too
            with contextlib.suppress(RuntimeError):  # the thread pool was shut down with the router
                asyncio.get_running_loop().run_in_executor(self._threads, trim_heap)
        self._large_body_lock.release()

    def with_tokens(self, prompt: Prompt, tag: str, tokens: "array[int]") -> Prompt:
        """Return a prompt that has other tokens in one format: an engine renders the chat otherwise."""
        known = self._formats.find(tag)
        if known is None:
            return prompt
        hashes = block_hashes(prompt_root(known.format, prompt.adapter, prompt.salt), tokens, known.format.block_tokens)
        prompt = msgspec.structs.replace(prompt, engine_tokens={**prompt.engine_tokens, tag: tokens})
        if tag == prompt.format_tag:
            return msgspec.structs.replace(prompt, length=len(tokens), hashes=hashes)
        return msgspec.structs.replace(prompt, other_hashes={**prompt.other_hashes, tag: hashes})

    def model_names(self) -> list[str]:
        return sorted({*self._formats.model_names(), *self._adapters(), self._served_name} - {""})

    def _read(self, path: str, raw: bytes, salt_of: Callable[[str], str], session: str) -> Prompt:
        try:
            body = self._body(path, raw)
        except validation.DECODING as error:  # a number out of range, or not a JSON object
            raise validation.decode_error(error) from None
        name = body.model if isinstance(body.model, str) else ""
        adapter = None if self._formats.has_model(name) else self._adapter(body.model)
        model = name if adapter is not None or self._formats.is_name_partial(name) else ""
        user = body.user if isinstance(body.user, str) else ""
        params = RequestParams.from_body(path, body)
        salt = salt_of(params.salt)
        conversation = conversation_of(body.messages, body.prompt, session) if self._canary_for is not None else 0
        canary = self._canary_for(conversation) if self._canary_for is not None else ""
        estimate = Prompt(len(raw) // _BYTES_A_TOKEN, user=user, params=params, salt=salt, model=model, conversation=conversation)
        known = self._formats.of_model(body.model, canary)
        if not self._tokenize or known is None:
            return estimate
        max_tokens = known.format.max_model_len
        try:
            if path in POOLED:
                if path != EMBEDDINGS:
                    return estimate  # several texts in separate fields
                tokens = pooling_prompts.tokens_of(body, lambda text: known.encoder.encode_text(text, scope=salt, max_tokens=max_tokens))
                return (
                    estimate
                    if tokens is None
                    else msgspec.structs.replace(estimate, length=len(tokens), tokens=tokens, format_tag=known.tag)
                )
            tokens, is_single = self._tokens(path, body, known, salt)
        except (PromptError, TypeError, ValueError, OverflowError, RecursionError):
            return estimate  # the worker refuses it with its own message
        if tokens is None:
            return estimate
        digest = adapter.digest if adapter is not None else ""
        hashes, others = self._hashes(known, tokens, digest, salt)
        sent = tokens if is_single else None
        return Prompt(len(tokens), hashes, sent, known.tag, user, params, salt, model, conversation, digest, others)

    def _hashes(self, known: KnownFormat, tokens: "array[int]", digest: str, salt: str) -> "tuple[array[int], dict[str, array[int]]]":
        """Return the block hashes in a format, and in the other formats with the same tokens by tag."""

        def of(one: KnownFormat) -> "array[int]":
            root = prompt_root(one.format, digest, salt) if digest or salt else one.root
            return block_hashes(root, tokens, one.format.block_tokens)

        return of(known), {one.tag: of(one) for one in self._formats.with_same_tokens(known)}

    def _body(self, path: str, raw: bytes) -> _Body:
        """Return the fields. A body of Responses or Messages is converted to the equivalent chat, and has no messages if that fails."""
        if not needs_conversion(path):
            return self._decoder.decode(raw)
        try:
            return msgspec.convert(read_chat(path, raw), _Body)
        except (msgspec.DecodeError, UnicodeDecodeError, PromptError, RecursionError):
            body = self._decoder.decode(raw)
            body.messages = body.prompt = None
            return body

    def _adapter(self, model: Any) -> Adapter | None:
        """Return the adapter of that name; None for a base model. Raises ApiError 404 for a name that no worker serves.

        Before the first worker has reported, the adapters' names are unknown, so a request with any name may wait for it.
        """
        if not isinstance(model, str):
            return None
        if (adapter := self._adapters().get(model)) is not None:
            return adapter
        names = self.model_names()
        if model in names or self._formats.current is None:
            return None
        message = f"The model {quote(model)} does not exist. Models served here: {', '.join(names)}."
        raise ApiError(404, message, param="model", code="model_not_found")

    def _tokens(self, path: str, body: _Body, known: KnownFormat, salt: str) -> "tuple[array[int] | None, bool]":
        """Return the (first) prompt's tokens, and whether the worker may use them instead of the text.

        `salt` separates tenants in the token cache.
        """
        if body.truncate_prompt_tokens is not None:
            return None, False  # the worker's context and the answer's length decide how much remains
        is_single = body.n in (None, 1) and body.best_of in (None, 1)
        encoder, max_tokens = known.encoder, known.format.max_model_len
        if path in _CHATS:
            if body.chat_template is not None or body.documents is not None or body.messages is None:
                return None, False
            return encoder.encode_chat(**build_encode_kwargs(body), scope=salt, max_tokens=max_tokens), is_single
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            is_single = is_single and len(prompt) == 1
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and bool not in set(map(type, prompt)):
            return array("I", prompt), is_single
        if not isinstance(prompt, str) or not prompt:
            return None, False
        return encoder.encode_text(prompt, body.add_special_tokens is not False, salt, max_tokens), is_single


def conversation_of(messages: Any, prompt: Any, session: str) -> int:
    """Return a number that all requests of a conversation share: of the session if the client names one, else of a chat's beginning.

    The beginning ends with the first user message, which tells chats with a common system prompt apart. A text prompt has no such boundary
    (its first block may be the same in all prompts), so each one is a separate conversation.
    """
    if session:
        beginning: Any = session
    elif isinstance(messages, list):
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        beginning = messages[: roles.index("user") + 1] if "user" in roles else messages
    else:
        beginning = prompt
    return xxhash.xxh3_64_intdigest(msgspec.json.encode(beginning)) or 1
