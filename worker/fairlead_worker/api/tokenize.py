"""Token ids over HTTP: the router's tokenized bodies, `/tokenize` and `/detokenize`."""

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from fairlead_common.truncate import quote
from fairlead_index.hashing import tokens_from_bytes
from fairlead_worker.api.answers.worker import Prompt, Tokens
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.router_headers import read_origin
from fairlead_worker.api.schema import DetokenizeRequest, TokenizeRequest, parse
from fairlead_worker.api.worker import Worker

TextOrTokens = str | Sequence[int]
"""A text, or its token ids."""
TOKENS_HEADER = b"x-fairlead-prompt-tokens"
FORMAT_HEADER = b"x-fairlead-prompt-format"


async def read_tokenized_body(worker: Worker, context: RequestContext) -> "tuple[array[int] | None, bytes]":
    """Return (prompt tokens, JSON) of a tokenized body: n uint32 before the JSON, with n in a header. Return (None, JSON) of a plain body.

    Also return (None, JSON) if the tokens were made with another prompt format than this worker's: the router has not read it yet.
    """
    body = await context.read_body(worker.config.limits.max_body_bytes)
    header = context.headers.get(TOKENS_HEADER)
    if header is None:
        return None, body
    if not header.isdigit() or len(header) > 12 or 4 * int(header) > len(body):
        raise invalid(
            f"X-Fairlead-Prompt-Tokens: {quote(header.decode('latin-1'))} does not fit a body of {len(body)} bytes", param="prompt"
        )
    end = 4 * int(header)
    if context.headers.get(FORMAT_HEADER, b"").decode("latin-1") not in ("", worker.prompt_etag):
        return None, body[end:]
    return tokens_from_bytes(memoryview(body)[:end]), body[end:]


def check_chat_template(worker: Worker, template: str | None, kwargs: dict[str, Any] | None) -> None:
    """Raise ApiError 400 unless the operator allows chat templates in requests. A template is a program, so only trusted clients may send
    one."""
    if "chat_template" in (kwargs or {}):
        raise invalid("chat_template_kwargs: chat_template is a separate field of the request", param="chat_template_kwargs")
    if template is not None and not worker.config.trust_request_chat_template:
        message = "chat_template: this server accepts only its model's own template (--trust-request-chat-template)"
        raise invalid(message, param="chat_template")


def list_texts(field: str, given: str | Sequence[Any] | None, other: str = "") -> list[tuple[str, TextOrTokens]]:
    """Return the texts of a field with their names: one text, several texts, one list of token ids, or several.

    `other`: what can be given instead. Raise ApiError 400.
    """
    if given is None or (not isinstance(given, str) and not given):
        raise invalid(f"{field}: is missing; give a string, token ids, or a list of either{other}", param=field)
    if isinstance(given, str) or all(isinstance(token, int) for token in given):
        return [(field, given)]
    if all(isinstance(text, str) for text in given) or all(isinstance(text, list) for text in given):
        return [(f"{field}[{index}]", text) for index, text in enumerate(given)]
    raise invalid(f"{field}: the list mixes strings and token ids", param=field)


async def tokenize(worker: Worker, context: RequestContext) -> None:
    """Handle `POST /tokenize` as vLLM does: convert a prompt or messages to token ids."""
    body = await context.read_body(worker.config.limits.max_body_bytes)
    request, most = parse(body, TokenizeRequest), worker.max_countable_tokens
    worker.check_model(request.model)
    check_chat_template(worker, request.chat_template, request.chat_template_kwargs)
    encoder, prompt, messages = worker.encoder, request.prompt, request.messages
    salt, _, _ = read_origin(context, None)
    continue_final = bool(request.continue_final_message)
    if (prompt is None) == (messages is None):
        raise invalid("prompt: give either prompt or messages", param="prompt")
    if prompt is not None:
        tokens = await worker.encode(
            lambda: encoder.encode_text(prompt, request.add_special_tokens is not False, salt, most), len(body), context.cpu
        )
    else:
        tokens = await worker.encode(
            lambda: encoder.encode_chat(
                messages,
                tools=request.tools or None,
                add_generation_prompt=request.add_generation_prompt is not False and not continue_final,
                continue_final_message=continue_final,
                template_kwargs=request.chat_template_kwargs,
                scope=salt,
                template=request.chat_template,
                add_special_tokens=bool(request.add_special_tokens),
                max_tokens=most,
            ),
            len(body),
            context.cpu,
        )

    def document() -> bytes:
        texts = [encoder.token_text(token) for token in tokens] if request.return_token_strs else None
        return msgspec.json.encode(Tokens(len(tokens), worker.max_model_len, tokens.tolist(), texts))

    await context.respond(200, await worker.encode(document, len(tokens), context.cpu))


async def detokenize(worker: Worker, context: RequestContext) -> None:
    """Handle `POST /detokenize` as vLLM does: convert token ids to text."""
    request = parse(await context.read_body(worker.config.limits.max_body_bytes), DetokenizeRequest, worker.max_model_len)
    worker.check_model(request.model)
    text = await worker.encode(lambda: worker.encoder.decode(request.tokens, skip_special_tokens=False), len(request.tokens), context.cpu)
    await context.respond_json(Prompt(text))
