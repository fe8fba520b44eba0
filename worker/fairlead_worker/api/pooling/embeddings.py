"""`POST /v1/embeddings`, and vLLM's `/pooling`, which returns the same vectors in another form."""

import asyncio
import math
import sys
from array import array
from base64 import b64encode
from operator import mul

import msgspec

from fairlead_common.protocols.paths import POOLING
from fairlead_worker.api.answers.pooling import Embedding, EmbeddingList, PooledData, PooledList
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.pooling.encode import INLINE_VALUES, compute, get_pooling
from fairlead_worker.api.pooling.schema import EmbeddingRequest
from fairlead_worker.api.router_headers import read_origin
from fairlead_worker.api.schema import parse
from fairlead_worker.api.tokenize import TextOrTokens, check_chat_template, list_texts, read_tokenized_body
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import Pooling


async def embeddings(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    prompt_tokens, body = await read_tokenized_body(worker, context)
    request = parse(body, EmbeddingRequest, worker.max_model_len)
    worker.check_model(request.model)
    dimensions = _check_dimensions(get_pooling(worker), request.dimensions)
    if request.messages is not None:
        inputs: list[tuple[str, TextOrTokens]] = [("messages", await _encode_messages(worker, context, request, len(body)))]
    else:
        inputs = [("input", prompt_tokens)] if prompt_tokens is not None else list_texts("input", request.input, ", or messages")
    result = await compute(worker, context, request, inputs, get_pooling(worker).kind)

    def document() -> bytes:
        vectors = [_encode_vector(truncate_vector(vector, dimensions), request.encoding_format) for vector in result.vectors]
        if context.path == POOLING:
            pooled = [PooledData(index=index, data=vector) for index, vector in enumerate(vectors)]
            return msgspec.json.encode(result.answer(PooledList, f"pool-{context.request_id}", pooled))
        data = [Embedding(index, vector) for index, vector in enumerate(vectors)]
        return msgspec.json.encode(EmbeddingList(data, result.model, result.usage()))

    large = sum(map(len, result.vectors)) > INLINE_VALUES
    await context.respond(200, await asyncio.to_thread(document) if large else document(), result.headers())


def truncate_vector(vector: "array[float]", dimensions: int | None) -> "array[float]":
    """Return the first `dimensions` values, scaled to unit length."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    part = vector[:dimensions]
    length = math.sqrt(sum(map(mul, part, part))) or 1.0
    return array("f", [value / length for value in part])


async def _encode_messages(worker: Worker, context: RequestContext, request: EmbeddingRequest, size: int) -> "array[int]":
    """Return the token ids of a chat, as vLLM embeds one: without a generation prompt unless the request wants it."""
    if request.input is not None:
        raise invalid("messages: give either input or messages", param="messages")
    check_chat_template(worker, request.chat_template, request.chat_template_kwargs)
    (salt, _, _), is_cut = read_origin(context, request.cache_salt), request.truncate_prompt_tokens is not None
    most = worker.max_countable_tokens if is_cut else worker.max_model_len
    return await worker.encode(
        lambda: worker.encoder.encode_chat(
            request.messages,
            add_generation_prompt=bool(request.add_generation_prompt),
            continue_final_message=bool(request.continue_final_message),
            template_kwargs=request.chat_template_kwargs,
            scope=salt,
            template=request.chat_template,
            add_special_tokens=bool(request.add_special_tokens),
            max_tokens=most,
        ),
        size,
        context.cpu,
    )


def _check_dimensions(pooling: Pooling, wanted: int | None) -> int | None:
    """Return `dimensions`, or None for all. Raise ApiError 400 if the model was not trained for embeddings of this length."""
    if wanted is None or wanted == pooling.size:
        return None
    if not pooling.any_dimensions and not pooling.dimensions:
        message = (
            f"dimensions: this model's embeddings have {pooling.size} values, and its config declares no others (is_matryoshka or "
            "matryoshka_dimensions); leave it out, or start the worker with --matryoshka if the model was trained for it"
        )
        raise invalid(message, param="dimensions")
    if pooling.dimensions and wanted not in pooling.dimensions:
        allowed = ", ".join(map(str, pooling.dimensions))
        raise invalid(f"dimensions: must be one of {allowed}, for which this model was trained, not {wanted}", param="dimensions")
    if wanted > pooling.size:
        raise invalid(f"dimensions: must be at most {pooling.size}, not {wanted}", param="dimensions")
    return wanted


def _encode_vector(vector: "array[float]", encoding: str | None) -> list[float] | str:
    if encoding != "base64":
        return vector.tolist()
    if sys.byteorder == "big":
        vector.byteswap()
    return b64encode(vector.tobytes()).decode()
