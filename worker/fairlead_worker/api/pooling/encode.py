"""Compute the pooled vectors or the logits of texts in the engine, for embeddings, scores, reranking and classification."""

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fairlead_common.prompts.encoder import PromptError, PromptTooLong
from fairlead_common.protocols.answer import Answer
from fairlead_common.protocols.paths import NO_EMBEDDINGS
from fairlead_common.telemetry.spans import Span
from fairlead_worker.api.answers.completions import PromptTokensDetails
from fairlead_worker.api.answers.pooling import AnswerList, PromptUsage
from fairlead_worker.api.engine.generation import Generation
from fairlead_worker.api.engine.spans import MAX_TRACED, EngineSpans
from fairlead_worker.api.errors import ApiError, failed, invalid, too_long
from fairlead_worker.api.generation.run import log_finished
from fairlead_worker.api.generation.sampling import truncate_prompt
from fairlead_worker.api.http import ClientGone, RequestContext
from fairlead_worker.api.pooling.schema import MAX_TEXTS
from fairlead_worker.api.replies import CACHED_HEADER, USAGE_HEADER
from fairlead_worker.api.request_cpu import RequestCpu
from fairlead_worker.api.router_headers import read_origin
from fairlead_worker.api.schema import InferenceRequest
from fairlead_worker.api.tokenize import TextOrTokens
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import Output, Pooling, PoolingKind, Sampling, Submit, Timing

INLINE_VALUES = 1 << 14
"""Vector values that are processed in the event loop. More of them go to a thread and do not delay streams."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts that a reranker reads as one input."""

    first: str
    second: str

    def __len__(self) -> int:
        return len(self.first) + len(self.second)


@dataclass(slots=True)
class PooledTexts:
    """Texts and, in the same order, their vectors or logits."""

    model: str
    texts: "Sequence[array[int]]"
    vectors: "list[array[float]]" = field(default_factory=list)
    """Embeddings have unit length."""
    cached_tokens: int = 0
    hidden_tokens: int = 0
    """Those of `cached_tokens` that the index did not show."""

    def usage(self) -> PromptUsage:
        tokens = sum(map(len, self.texts))
        return PromptUsage(tokens, tokens, PromptTokensDetails(self.cached_tokens))

    def answer(self, kind: Callable[..., AnswerList], id: str, data: Sequence[Answer]) -> AnswerList:
        """Return an answer of this kind."""
        return kind(id=id, created=int(time.time()), model=self.model, data=data, usage=self.usage())

    def headers(self) -> dict[str, str]:
        """Return the headers that the router reads."""
        return {CACHED_HEADER: str(self.cached_tokens - self.hidden_tokens), USAGE_HEADER: f"{sum(map(len, self.texts))} 0"}


def get_pooling(worker: Worker) -> Pooling:
    """Return the model's pooling. Raise ApiError 400 if the model makes no embeddings."""
    pooling = worker.ready.pooling
    if pooling.kind is None:
        raise invalid(f"this model makes no embeddings: {pooling.refused}", code=NO_EMBEDDINGS)
    return pooling


async def compute(
    worker: Worker,
    context: RequestContext,
    request: InferenceRequest,
    texts: Sequence[tuple[str, TextOrTokens | Pair]],
    kind: PoolingKind | Literal["classify"] | None,
) -> PooledTexts:
    """Return what the engine makes of `texts`, which come with the names of their fields (`input[3]`). Abort them if the client
    disconnects.

    Raise ApiError: 400 that names the field, or any error of other requests.
    """
    model = worker.check_model(request.model)
    if len(texts) > MAX_TEXTS:
        name = texts[-1][0].partition("[")[0]
        raise invalid(f"{name}: {len(texts)} texts are more than {MAX_TEXTS} in one request", param=name)
    salt, tenant, priority = read_origin(context, request.cache_salt, request.priority, request.user)
    firsts: dict[str, array[int]] = {}

    def encode(text: tuple[str, TextOrTokens | Pair]) -> "tuple[array[int], int]":
        return _tokens(worker, request, *text, salt, firsts)

    encoded = await worker.encode_list(encode, texts, [len(text) for _, text in texts], context.cpu)
    with worker.adapters.use(model) as adapter:
        root = worker.root_of(adapter.digest if adapter else "", salt)
        number, sampling = adapter.number if adapter else 0, Sampling(max_tokens=1)
        submits = [
            Submit("", tokens.tobytes(), sampling, root, priority, tenant, number, pooling=kind, second=second)
            for tokens, second in encoded
        ]
        run = PoolingRun(worker, PooledTexts(model, [tokens for tokens, _ in encoded]), context.span, context.cpu)
        try:
            await context.while_connected(run.execute(submits))
        except ClientGone:
            run.record_disconnect()
            context.cpu.add_computed(run.num_computed)
            raise
        finally:
            run.log_summary(context.request_id)
        context.cpu.tokens = sum(map(len, run.result.texts))
        return run.result


def _tokens(
    worker: Worker, request: InferenceRequest, name: str, text: TextOrTokens | Pair, salt: str, firsts: "dict[str, array[int]]"
) -> "tuple[array[int], int]":
    """Tokenize a text, truncate it if the request wants that, and check its vocabulary and length.

    Return the tokens, and where the second text of a pair begins. An encoder's text keeps the special tokens around it when it is cut.
    `firsts`: first texts of pairs that are tokenized already: a query of a megabyte may have 2,047 documents.
    """
    field, most, wanted = name.partition("[")[0], worker.max_model_len, request.truncate_prompt_tokens

    def refusal(tokens: str) -> ApiError:
        return too_long(f"{name} is too long: it has {tokens} tokens; shorten or split it, or set truncate_prompt_tokens", most, field)

    def encode(text: str, add_special_tokens: bool) -> "array[int]":
        known = worker.max_countable_tokens if wanted is not None else most
        return worker.encoder.encode_text(text, add_special_tokens, salt, known)

    try:
        second = 0
        if isinstance(text, Pair) or (worker.ready.is_encoder and wanted is not None and isinstance(text, str)):
            limit = None if wanted is None else most if wanted < 0 else min(wanted, most)
            parts = [encode(text, False)] if isinstance(text, str) else [firsts.get(text.first) or encode(text.first, False)]
            if isinstance(text, Pair):
                firsts[text.first] = parts[0]
                parts.append(encode(text.second, False))
            tokens, second = worker.encoder.template(len(parts)).join(parts, limit, request.truncation_side == "left")
        elif isinstance(text, str):
            tokens = encode(text, True)
        else:
            tokens = array("I", text)
    except PromptTooLong as error:
        raise refusal(f"at least {error.min_tokens}") from error
    except PromptError as error:
        raise invalid(f"{name}: {error.reason}", param=field) from error
    if wanted is not None:
        tokens = truncate_prompt(tokens, most if wanted < 0 else wanted, None, most, request.truncation_side == "right")
    worker.check_tokens(tokens, name)
    if len(tokens) > most:
        raise refusal(str(len(tokens)))
    return tokens, second


@dataclass(slots=True)
class PoolingRun:
    """One pass through the engine, timed for metrics and the log."""

    worker: Worker
    result: PooledTexts
    span: Span
    cpu: RequestCpu
    start_time: float = field(default_factory=time.monotonic)
    num_finished: int = 0
    num_computed: int = 0
    """Tokens of the finished texts, without cached ones."""
    finish: str = "error"
    timings: list[Timing] = field(default_factory=list)

    async def execute(self, submits: Sequence[Submit]) -> None:
        self.worker.check_queue_limit(len(submits), submits[0].tenant)
        vectors: list[array[float]] = [array("f")] * len(submits)
        spans = EngineSpans(self.span, self.start_time) if self.span.is_recording else None
        traced = 0 if spans is None else MAX_TRACED

        def report(_: int, output: Output) -> None:
            self.cpu.add_computed(output.computed_tokens)

        async with Generation(self.worker.engine, submits, traced, report) as generation:
            async for batch in generation.outputs():
                for index, output in batch:
                    if spans is not None:
                        spans.record(index, output, time.monotonic())
                    vectors[index] = self._take(index, output)
        self.result.vectors, self.finish = vectors, "stop"

    def _take(self, index: int, output: Output) -> "array[float]":
        metrics = self.worker.metrics
        metrics.count_finished(output.finish or "error")
        if not output.embedding:
            raise failed(f"the engine could not process a text: {output.error or output.finish}")
        self.num_finished += 1
        self.num_computed += len(self.result.texts[index]) - output.cached_tokens
        self.result.cached_tokens += output.cached_tokens
        metrics.prompt_size.observe(len(self.result.texts[index]))
        metrics.e2e_latency.observe(time.monotonic() - self.start_time)
        if output.timing is not None:
            self.timings.append(output.timing)
            self.result.hidden_tokens += output.timing.hidden_cached_tokens
            metrics.queue_time.observe(output.timing.queue_seconds)
            metrics.prefill_time.observe(output.timing.prefill_seconds)
        vector = array("f")
        vector.frombytes(output.embedding)
        return vector

    def record_disconnect(self) -> None:
        """Mark unfinished texts as aborted, because the client disconnected."""
        self.finish = "abort"
        for _ in range(len(self.result.texts) - self.num_finished):
            self.worker.metrics.count_finished("abort")

    def log_summary(self, request_id: str) -> None:
        """Log what the request took, and finish its span."""
        line = {
            "request": request_id,
            "finish": [self.finish],
            "prompts": len(self.result.texts),
            "sequences": len(self.result.texts),
            "prompt_tokens": sum(map(len, self.result.texts)),
            "cached_tokens": self.result.cached_tokens,
            "host_cached_tokens": sum(timing.host_cached_tokens for timing in self.timings),
            "output_tokens": 0,
        }
        log_finished(line, self.timings, self.start_time)
        self.span.set({"gen_ai.usage.input_tokens": sum(map(len, self.result.texts)), "fairlead.cached_tokens": self.result.cached_tokens})
