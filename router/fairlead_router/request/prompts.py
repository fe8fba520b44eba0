"""A request's body, read once: which model, which prompt, and the prompt's tokens and block hashes."""

import asyncio
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_index.hashing import block_hashes
from fairlead_index.prompt import PromptError
from fairlead_router.errors import ApiError
from fairlead_router.fleet.adapters import Adapter
from fairlead_router.fleet.formats import KnownFormat, PromptFormats
from fairlead_router.request.asked import Asked
from fairlead_router.tenancy.tenants import ANYONE

PROMPTED = ("/v1/completions", "/v1/chat/completions")
"""Paths whose requests are for the engine."""
_CHAT = "/v1/chat/completions"
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
    chat_template: Any = None
    documents: Any = None
    suffix: Any = None
    truncate_prompt_tokens: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    priority: Any = None
    cache_salt: Any = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the router knows of a prompt. `tokens` only where the worker may take them instead of the text."""

    length: int = 0
    """Tokens; estimated from bytes where it was not tokenized."""
    hashes: Sequence[int] = field(default_factory=lambda: array("Q"))
    tokens: "array[int] | None" = None
    format_tag: str = ""
    user: str = ""
    asked: Asked = field(default_factory=Asked)
    salt: str = ""
    """Of the caller's tenant and its own `cache_salt`: part of the root of `hashes`, and for the worker to say the same."""
    model: str = ""
    """The name that a worker must answer to; empty where every worker does."""


class Prompts:
    """Reads bodies in a pool of threads: a long prompt must not hold up the streams of others."""

    def __init__(
        self,
        formats: PromptFormats,
        threads: Executor,
        tokenize: bool,
        served_name: str = "",
        adapters: Callable[[], Mapping[str, Adapter]] = dict,
    ) -> None:
        self._formats, self._threads, self._tokenize = formats, threads, tokenize
        self._served_name, self._adapters = served_name, adapters
        self._decoder = msgspec.json.Decoder(_Body)

    async def read(self, path: str, body: bytes, salt_of: Callable[[str], str] = ANYONE.salt) -> Prompt:
        """`salt_of`: the caller's salt, given the client's own.

        Raises ApiError: 400 for what is not a JSON object, 404 for a model that no worker serves.
        """
        names = self.model_names()
        if len(body) <= INLINE_BYTES:
            return self._read(path, body, names, salt_of)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read, path, body, names, salt_of)

    def model_names(self) -> list[str]:
        return sorted({*self._formats.model_names(), *self._adapters(), self._served_name} - {""})

    def _read(self, path: str, raw: bytes, names: Collection[str], salt_of: Callable[[str], str]) -> Prompt:
        try:
            body = self._decoder.decode(raw)
        except msgspec.ValidationError:
            raise ApiError(400, "The request body must be a JSON object.") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The request body is not valid JSON: {error}.") from None
        except RecursionError:
            raise ApiError(400, "The request body is nested too deeply.") from None
        if isinstance(body.model, str) and names and body.model not in names:
            message = f"The model {body.model[:200]!r} does not exist. Models served here: {', '.join(names)}."
            raise ApiError(404, message, param="model", code="model_not_found")
        name = body.model if isinstance(body.model, str) else ""
        adapter = self._adapters().get(name)
        model = name if adapter is not None or self._formats.divided_by(name) else ""
        user = body.user if isinstance(body.user, str) else ""
        asked = Asked.by(path, body)
        salt = salt_of(asked.salt)
        guess = Prompt(length=len(raw) // _BYTES_A_TOKEN, user=user, asked=asked, salt=salt, model=model)
        known = self._formats.of_model(body.model)
        if not self._tokenize or known is None:
            return guess
        try:
            tokens, alone = self._tokens(path, body, known, salt)
        except (PromptError, TypeError, ValueError, OverflowError, RecursionError):
            return guess  # the worker refuses it, in its own words
        if tokens is None:
            return guess
        digest = adapter.digest if adapter is not None else ""
        root = known.format.root(digest, salt) if digest or salt else known.root
        hashes = block_hashes(root, tokens, known.format.block_tokens)
        return Prompt(len(tokens), hashes, tokens if alone else None, known.tag, user, asked, salt, model)

    def _tokens(self, path: str, body: _Body, known: KnownFormat, salt: str) -> "tuple[array[int] | None, bool]":
        """The (first) prompt's tokens, and whether they may stand for the whole prompt on the way to the worker.

        `salt` parts the tenants in the cache of tokens.
        """
        alone = body.n in (None, 1) and body.best_of in (None, 1) and body.suffix is None and body.truncate_prompt_tokens is None
        encoder = known.encoder
        if path == _CHAT:
            if body.chat_template is not None or body.documents is not None or body.messages is None:
                return None, False
            # What a worker makes of these is its own affair: good enough to route by, not to stand for the prompt.
            alone = alone and not body.continue_final_message and body.tool_choice != "none" and body.tools != []
            tokens = encoder.encode_chat(
                body.messages,
                body.tools or None,
                body.add_generation_prompt is not False and not body.continue_final_message,
                bool(body.continue_final_message),
                body.chat_template_kwargs,
                scope=salt,
            )
            return tokens, alone
        prompt = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            alone = alone and len(prompt) == 1
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and bool not in set(map(type, prompt)):
            return array("I", prompt), alone
        if not isinstance(prompt, str) or not prompt:
            return None, False
        return encoder.encode_text(prompt, scope=salt), alone
