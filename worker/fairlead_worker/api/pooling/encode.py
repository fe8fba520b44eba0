"""Texts through the engine to vectors: what embeddings, scores and rerankings share."""

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fairlead_common.prompts.encoder import PromptError, PromptTooLong
from fairlead_index.hashing import prompt_root
from fairlead_worker.api.engine.client import Submission
from fairlead_worker.api.errors import ApiError, failed, invalid
from fairlead_worker.api.http import ClientGone, Exchange
from fairlead_worker.api.pooling.schema import MOST_TEXTS, PooledRequest
from fairlead_worker.api.replies import CACHED_HEADER, USAGE_HEADER
from fairlead_worker.api.router_headers import origin
from fairlead_worker.api.worker import Worker
from fairlead_worker.messages import Output, Pooling, Sampling, Timing

logger = logging.getLogger(__name__)

INLINE_VALUES = 1 << 14
"""Of vectors that are worked on in the event loop; more are in a thread, not in the way of everybody's streams."""

Text = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(slots=True)
class Pooled:
    """Texts and, in their order, what the engine has made of them."""

    model: str
    texts: "Sequence[array[int]]"
    vectors: "list[array[float]]" = field(default_factory=list)
    """Each of unit length."""
    cached_tokens: int = 0

    def usage(self) -> dict[str, Any]:
        tokens = sum(map(len, self.texts))
        return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}

    def headers(self) -> dict[str, str]:
        """What the router wants to know."""
        return {CACHED_HEADER: str(self.cached_tokens), USAGE_HEADER: f"{sum(map(len, self.texts))} 0"}


def pooling_of(worker: Worker) -> Pooling:
    """How this model makes embeddings. Raises ApiError 400 where it makes none."""
    pooling = worker.ready.pooling
    if pooling.kind is None:
        raise invalid(f"this model makes no embeddings: {pooling.refused}", code="embeddings_not_served")
    return pooling


async def pooled(worker: Worker, exchange: Exchange, request: PooledRequest, texts: Sequence[tuple[str, Text]]) -> Pooled:
    """The vectors of `texts`, each with the name of its field (`input[3]`). A client that goes takes its texts with it.

    Raises ApiError: 400 that names the field, or whatever becomes of any other request.
    """
    model = worker.check_model(request.model)
    kind = pooling_of(worker).kind
    if len(texts) > MOST_TEXTS:
        name = texts[-1][0].partition("[")[0]
        raise invalid(f"{name}: {len(texts)} texts are more than {MOST_TEXTS} in one request", param=name)
    by = origin(exchange, request.cache_salt)
    size = sum(len(text) for _, text in texts)
    tokens = await worker.encode(lambda: [_tokens(worker, name, text, by.salt) for name, text in texts], size)
    with worker.adapters.use(model) as adapter:
        root = prompt_root(worker.encoder.format, adapter.digest, by.salt) if adapter else worker.plain_root(by.salt)
        priority = (request.priority or 0) if by.priority is None else by.priority
        tenant = (request.user or "") if by.tenant is None else by.tenant
        number, sampling = adapter.number if adapter else 0, Sampling(max_tokens=1)
        submissions = [Submission(each, sampling, root, priority, tenant, number, pooling=kind) for each in tokens]
        run = _Run(worker, Pooled(model, tokens))
        try:
            await exchange.while_connected(run.through(submissions))
        except ClientGone:
            run.gone()
            raise
        finally:
            run.log(exchange.request_id)
        return run.pooled


def _tokens(worker: Worker, name: str, text: Text, salt: str) -> "array[int]":
    """Checked: some, in the vocabulary, not too many."""
    field, most = name.partition("[")[0], worker.max_model_len

    def too_long(tokens: str) -> ApiError:
        message = f"{name}: has {tokens} tokens, and the longest text here has {most}; shorten or split it"
        return invalid(message, param=field, code="context_length_exceeded")

    try:
        tokens = worker.encoder.encode_text(text, scope=salt, most=most) if isinstance(text, str) else array("I", text)
    except PromptTooLong as error:
        raise too_long(f"at least {error.least}") from error
    except PromptError as error:
        raise invalid(f"{name}: {error.reason}", param=field) from error
    worker.check_tokens(tokens, name)
    if len(tokens) > most:
        raise too_long(str(len(tokens)))
    return tokens


@dataclass(slots=True)
class _Run:
    """One pass through the engine, timed for the metrics and the log."""

    worker: Worker
    pooled: Pooled
    began: float = field(default_factory=time.monotonic)
    done: int = 0
    finish: str = "error"
    timings: list[Timing] = field(default_factory=list)

    async def through(self, submissions: Sequence[Submission]) -> None:
        self.worker.make_way(len(submissions))
        vectors: list[array[float]] = [array("f")] * len(submissions)
        async with self.worker.engine.generate(submissions) as generation:
            async for batch in generation.outputs():
                for index, output in batch:
                    vectors[index] = self._take(index, output)
        self.pooled.vectors, self.finish = vectors, "stop"

    def _take(self, index: int, output: Output) -> "array[float]":
        metrics = self.worker.metrics
        metrics.finished(output.finish or "error")
        if not output.embedding:
            raise failed(f"the engine gave a text up: {output.error or output.finish}")
        self.done += 1
        self.pooled.cached_tokens += output.cached_tokens
        metrics.prompt_size.observe(len(self.pooled.texts[index]))
        metrics.whole_request.observe(time.monotonic() - self.began)
        if output.timing is not None:
            self.timings.append(output.timing)
            metrics.queue_time.observe(output.timing.queue_seconds)
            metrics.prefill_time.observe(output.timing.prefill_seconds)
        vector = array("f")
        vector.frombytes(output.embedding)
        return vector

    def gone(self) -> None:
        """The client left before the end."""
        self.finish = "abort"
        for _ in range(len(self.pooled.texts) - self.done):
            self.worker.metrics.finished("abort")

    def log(self, request_id: str) -> None:
        """One line of JSON, as for generations: no word or token of the request."""
        line = {
            "request": request_id,
            "finish": [self.finish],
            "prompts": len(self.pooled.texts),
            "sequences": len(self.pooled.texts),
            "prompt_tokens": sum(map(len, self.pooled.texts)),
            "cached_tokens": self.pooled.cached_tokens,
            "host_cached_tokens": sum(timing.host_cached_tokens for timing in self.timings),
            "output_tokens": 0,
            "queue_ms": _ms([timing.queue_seconds for timing in self.timings]),
            "prefill_ms": _ms([timing.prefill_seconds for timing in self.timings]),
            "e2e_ms": _ms([time.monotonic() - self.began]),
            "retractions": sum(timing.preemptions for timing in self.timings),
        }
        logger.info("finished %s", msgspec.json.encode(line).decode())


def _ms(seconds: Sequence[float]) -> float | None:
    return round(max(seconds) * 1000, 1) if seconds else None
