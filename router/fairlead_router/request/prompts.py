"""Reading of request bodies: the model, the prompt, and the prompt's tokens and block hashes."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import thread_time
from typing import Any, Final, TypeVar

import msgspec

from fairlead_common.fair_slots import FairSlots
from fairlead_common.json_size import JsonSize, JsonTooLarge, check_json
from fairlead_common.memory import LARGE
from fairlead_common.protocols.chats import needs_conversion
from fairlead_common.protocols.paths import POOLED
from fairlead_common.truncate import quote
from fairlead_index.hashing import block_hashes, prompt_root
from fairlead_router.errors import ApiError
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.prompt_formats import KnownFormat, PromptFormats
from fairlead_router.request import validation
from fairlead_router.request.body import Chain, Encoded, Encoding, RequestParams, encode, read_fields
from fairlead_router.request.parser_pool import ParserPool, ParserProcess
from fairlead_router.request.price import TOKEN_PRICE, price_of, price_of_cpu
from fairlead_router.routing.policies import RoutingRequest
from fairlead_router.tenancy.tenants import ANONYMOUS, Caller

_BYTES_A_TOKEN = 4
"""Estimate for prompts that are not tokenized here; it only serves to compare waiting times."""
INLINE_BYTES: Final = 1024
"""Bodies up to this size are parsed on the event loop: waking a thread costs more (0.1 ms to tokenize a thousand bytes)."""
FAIR_BYTES: Final = 16 << 10
"""Bodies from here on take turns by tenant: 250 KB of dense text take 70 ms of a thread."""
UNCOUNTED: Final = JsonSize(0, 0)
"""Of such a body: its bytes bound its nodes."""
THREAD_OBJECTS: Final = 4096
"""Objects, lists and keys up to which a body of at most LARGE bytes is decoded in a thread. It holds Python's lock for 1 to 2 ms."""


COUNTED_SECONDS: Final = 0.001
"""CPU time of reading in a thread up to which a body costs what is counted in it. Beyond, it may have what is not counted: JSON in the
arguments of its tool calls, or a text that is tokenized in pieces first."""

Result = TypeVar("Result")


class Prompt(RoutingRequest, frozen=True, kw_only=True):
    """The router's knowledge of a prompt: what a routing policy reads, and what the worker gets.

    `prompt_tokens` is estimated from bytes if the prompt was not tokenized.
    """

    tokens: "array[int] | None" = None
    """Set only where the worker may use them instead of the text."""
    params: RequestParams = RequestParams()
    salt: str = ""
    """Salt of the tenant and the client's `cache_salt`. It is part of the root of `hashes`, and the worker gets it in a header."""
    engine_tokens: "Mapping[str, array[int]]" = msgspec.field(default_factory=dict)
    """Tokens in formats whose engine renders the chat otherwise, by tag. Its agent counts with them, and the engine gets the text."""
    price: float = 0.0
    """Tokens that its reading has cost the tenant already."""
    min_tokens: int = 0
    """Least length of a prompt that is certainly longer than `longest`, every context of its model; 0 for any other."""
    longest: int = 0

    def tokens_for(self, tag: str) -> "array[int] | None":
        """Return the token ids that a worker with this format gets beside the text; None: they are not known."""
        if (tokens := self.engine_tokens.get(tag)) is not None:
            return tokens
        return self.tokens if tag in (self.format_tag, *self.other_hashes) else None


def estimate_prompt(size: int, salt: str = "", session: str = "") -> Prompt:
    """Return the estimate for a body of `size` bytes that is not read here and generates nothing. Its price is the worker's."""
    tokens, params = size // _BYTES_A_TOKEN, RequestParams(max_output=0)
    return Prompt(tokens, session=session, params=params, salt=salt, price=price_of(size, JsonSize(0, 0), tokens))


class Prompts:
    """Reader of request bodies in threads and processes, so that no body stalls other requests' streams."""

    def __init__(
        self,
        formats: PromptFormats,
        threads: ThreadPoolExecutor,
        tokenize: bool,
        served_name: str = "",
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
        canary_for: Callable[[int], str] | None = None,
    ) -> None:
        """`canary_for`: returns the revision whose canaries a conversation goes to, if any; None without canaries."""
        self._formats, self._threads, self._tokenize = formats, threads, tokenize
        self._served_name, self._adapters, self._canary_for = served_name, adapters, canary_for
        self._pool = ParserPool(formats.cache)
        self._slots = FairSlots(threads._max_workers)

    def close(self) -> None:
        self._pool.close()

    async def read(
        self,
        path: str,
        body: bytes,
        caller: Caller = ANONYMOUS,
        session: str = "",
        pay: Callable[[float], None] = lambda tokens: None,
    ) -> Prompt:
        """Read a body. `caller`: whose request it is. `session`: the client's name of the conversation.

        `pay` takes the price in tokens, whether or not the request is refused. Large bodies are read in processes, one at a time for
        each tenant: they take up to 170 times their size, and seconds of CPU. An empty `path` stands for that of a chat or a completion.

        Raises ApiError: 400 for a body that is not a JSON object or has too many nodes, 404 for a model that no worker serves, 413 for a
        body that takes too much CPU or memory.
        """
        is_short = len(body) <= INLINE_BYTES
        size = UNCOUNTED if is_short else self._check_here(body, pay)
        if size is None:
            return await self._read_large(path, body, caller, session, pay)
        try:
            if is_short:
                prompt = self._read(path, body, caller, session, size)
            else:
                prompt = await self._in_thread(caller.tenant.name, len(body), self._read, path, body, caller, session, size)
        except asyncio.CancelledError:  # the client is gone, and the prompt is tokenized nevertheless
            pay(price_of(len(body), size, len(body) // _BYTES_A_TOKEN))
            raise
        except ApiError:
            pay(price_of(len(body), size, 0))
            raise
        pay(prompt.price)
        return prompt

    async def _in_thread(self, tenant: str, size: int, work: Callable[..., Result], *args: Any) -> Result:
        """Run work on a body of `size` bytes in a thread. A tenant has one thread for its longer bodies: four could hold all threads."""
        start = partial(asyncio.get_running_loop().run_in_executor, self._threads, work, *args)
        if size <= FAIR_BYTES or not tenant:
            return await start()
        return await self._slots.run(tenant, lambda slot: start())

    async def _read_large(self, path: str, body: bytes, caller: Caller, session: str, pay: Callable[[float], None]) -> Prompt:
        paid = 0.0

        def pay_for_cpu(seconds: float) -> None:
            nonlocal paid
            paid = price_of_cpu(len(body), seconds)
            pay(paid)

        prompt = await self._pool.run(caller.tenant.name, partial(self._read_in_process, path, body, caller, session), pay_for_cpu)
        return msgspec.structs.replace(prompt, price=paid)

    async def validate(self, path: str, body: bytes, tenant: str = "", pay: Callable[[float], None] = lambda tokens: None) -> None:
        """Raise ApiError 400 for a body that every worker would refuse. `pay`: as for `read`; an accepted body is paid when it is read."""
        size = UNCOUNTED if len(body) <= INLINE_BYTES else self._check_here(body, pay)
        if size is None:
            longest, price = self._formats.longest_prompt(), partial(price_of_cpu, len(body))
            await self._pool.run(tenant, lambda process: process.validate(path, body, longest), lambda seconds: pay(price(seconds)))
            return
        try:
            if size is UNCOUNTED:
                validation.check(path, body)
            else:
                await self._in_thread(tenant, len(body), validation.check, path, body)
        except ApiError:
            pay(price_of(len(body), size, 0))
            raise

    async def check_size(self, body: bytes, pay: Callable[[float], None]) -> None:
        """Raise ApiError 400 for a body with too many nodes, which a worker reads. `pay`: as for `read`, of a refused body."""
        try:
            if len(body) <= LARGE:
                check_json(body, self._formats.longest_prompt())
            else:
                await asyncio.get_running_loop().run_in_executor(self._threads, check_json, body, self._formats.longest_prompt())
        except JsonTooLarge as error:
            pay(price_of(len(body), JsonSize(0, 0), 0))
            raise validation.too_large(error) from None

    def with_tokens(self, prompt: Prompt, tag: str, tokens: "array[int]") -> Prompt:
        """Return a prompt that has other tokens in one format: an engine renders the chat otherwise."""
        known = self._formats.find(tag)
        if known is None:
            return prompt
        hashes = block_hashes(prompt_root(known.format, prompt.adapter, prompt.salt), tokens, known.format.block_tokens)
        prompt = msgspec.structs.replace(prompt, engine_tokens={**prompt.engine_tokens, tag: tokens})
        if tag == prompt.format_tag:
            return msgspec.structs.replace(prompt, prompt_tokens=len(tokens), hashes=hashes)
        return msgspec.structs.replace(prompt, other_hashes={**prompt.other_hashes, tag: hashes})

    def model_names(self) -> list[str]:
        return sorted({*self._formats.model_names(), *self._adapters(), self._served_name} - {""})

    def _check_here(self, body: bytes, pay: Callable[[float], None] = lambda tokens: None) -> JsonSize | None:
        """Return the size of a body that is decoded in this process; None for another. Raises ApiError 400 for too many nodes."""
        if len(body) > LARGE:
            return None
        began = thread_time()
        try:
            size = check_json(body, self._formats.longest_prompt(), THREAD_OBJECTS)
        except JsonTooLarge as error:
            pay(price_of_cpu(len(body), thread_time() - began))
            raise validation.too_large(error) from None
        return size if size.objects <= THREAD_OBJECTS else None

    def _read(self, path: str, raw: bytes, caller: Caller, session: str, size: JsonSize) -> Prompt:
        is_timed = len(raw) > INLINE_BYTES or needs_conversion(path)
        began = thread_time() if is_timed else 0.0  # a system call, so not for what is short and read without tokens
        params, body = read_fields(path, raw, session, self._canary_for is not None, size)
        prompt, known, encoding = self._plan(params, len(raw), caller, session)
        if known is not None and encoding is not None:
            began = began or thread_time()
            prompt = _with_encoded(prompt, known, encoding, encode(params.path, body, known.encoder, encoding))
        if began and (cpu := thread_time() - began) > COUNTED_SECONDS:
            return msgspec.structs.replace(prompt, price=max(prompt.price, price_of_cpu(len(raw), cpu)))
        return prompt

    def _read_in_process(self, path: str, raw: bytes, caller: Caller, session: str, process: ParserProcess) -> Prompt:
        params = process.read(path, raw, session, self._canary_for is not None, self._formats.longest_prompt())
        prompt, known, encoding = self._plan(params, len(raw), caller, session)
        if known is None or encoding is None:
            return prompt
        return _with_encoded(prompt, known, encoding, process.encode(known.tag, known.format, encoding))

    def _plan(self, params: RequestParams, size: int, caller: Caller, session: str) -> tuple[Prompt, KnownFormat | None, Encoding | None]:
        """Return what is known without the prompt's tokens, and how to encode it; None for a prompt that is not encoded here.

        Raises ApiError 404.
        """
        name = params.model or ""
        adapter = None if params.model is None or self._formats.has_model(name) else self._adapter(params.model)
        salt = caller.salt(params.salt)
        canary = self._canary_for(params.conversation) if self._canary_for is not None else ""
        known = self._formats.of_model(params.model, canary) if self._tokenize else None
        has_kv = known is not None and params.path not in POOLED
        digest = adapter.digest if adapter is not None and has_kv else ""
        prompt = Prompt(
            size // _BYTES_A_TOKEN,
            session=caller.session(session or params.user),
            model=name if adapter is not None or self._formats.is_name_partial(name) else "",
            conversation=params.conversation,
            adapter=digest,
            params=params,
            salt=salt,
            price=price_of(size, params.size, 0),
        )
        if known is None:
            return prompt, None, None
        longest, chains = known.format.max_model_len, [_chain(known, digest, salt)] if has_kv else []
        for other in self._formats.with_same_tokens(known):
            longest = max(longest, other.format.max_model_len)
            if has_kv:
                chains.append(_chain(other, digest, salt))
        return prompt, known, Encoding(salt, longest, chains)

    def _adapter(self, model: str) -> Adapter | None:
        """Return the adapter of that name; None for a base model. Raises ApiError 404 for a name that no worker serves.

        Before the first worker has reported, the adapters' names are unknown, so a request with any name may wait for it.
        """
        if (adapter := self._adapters().get(model)) is not None:
            return adapter
        names = self.model_names()
        if model in names or self._formats.current is None:
            return None
        message = f"The model {quote(model)} does not exist. Models served here: {', '.join(names)}."
        raise ApiError(404, message, param="model", code="model_not_found")


def _chain(known: KnownFormat, adapter: str, salt: str) -> Chain:
    root = prompt_root(known.format, adapter, salt) if adapter or salt else known.root
    return Chain(known.tag, root, known.format.block_tokens)


def _with_encoded(prompt: Prompt, known: KnownFormat, encoding: Encoding, encoded: Encoded) -> Prompt:
    """Return the prompt with its tokens and hashes, and the price of them."""
    price, tokens = prompt.price + encoded.computed * TOKEN_PRICE, encoded.tokens
    if tokens is None:
        return msgspec.structs.replace(prompt, adapter="", price=price, min_tokens=encoded.min_tokens, longest=encoding.max_tokens)
    sent = tokens if encoded.is_single else None
    if not encoding.chains:
        return msgspec.structs.replace(prompt, prompt_tokens=len(tokens), tokens=sent, format_tag=known.tag, price=price)
    hashes, *others = encoded.hashes
    tags = (chain.tag for chain in encoding.chains[1:])
    other_hashes = dict(zip(tags, others, strict=True))
    return msgspec.structs.replace(
        prompt, prompt_tokens=len(tokens), hashes=hashes, tokens=sent, format_tag=known.tag, price=price, other_hashes=other_hashes
    )
