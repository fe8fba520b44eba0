"""`POST /score` and `/rerank`, as vLLM answers them: a reranker reads both texts as one input; else the cosine of their embeddings."""

import asyncio
from array import array
from collections.abc import Sequence

from msgspec import UNSET

from fairlead_worker.api.answers.pooling import RankedDocument, RankedText, Ranking, Score, ScoreList
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.pooling.classify import compute_scores
from fairlead_worker.api.pooling.encode import INLINE_VALUES, Pair, PooledTexts, compute, get_pooling
from fairlead_worker.api.pooling.schema import RerankRequest, ScoreRequest
from fairlead_worker.api.schema import parse
from fairlead_worker.api.worker import Worker

SIDES = (("text_1", "data_1", "queries"), ("text_2", "data_2", "documents", "items"))
"""Names of the two sides of a score: vLLM's older ones first."""


async def score(worker: Worker, context: RequestContext) -> None:
    """Score each text of the second side with the only text of the first, or with the one at the same index."""
    request = parse(await context.read_body(worker.config.limits.max_body_bytes), ScoreRequest)
    (left_name, first), (right_name, second) = (_find_side(request, names) for names in SIDES)
    if len(first) not in (1, len(second)):
        message = f"{left_name}: has {len(first)} texts and {right_name} {len(second)}; give one, or as many as {right_name}"
        raise invalid(message, param=left_name)
    result, scores = await _compare(worker, context, request, first, second)
    data = [Score(index=index, score=score) for index, score in enumerate(scores)]
    await context.respond_json(result.answer(ScoreList, f"score-{context.request_id}", data), result.headers())


async def rerank(worker: Worker, context: RequestContext) -> None:
    """Rank the documents by their scores with the query."""
    request = parse(await context.read_body(worker.config.limits.max_body_bytes), RerankRequest)
    if request.query is None:
        raise invalid("query: is missing", param="query")
    if not request.documents:
        raise invalid("documents: is missing; give a list of texts", param="documents")
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    named = [(f"documents[{index}]", text) for index, text in enumerate(texts)]
    result, scores = await _compare(worker, context, request, [("query", request.query)], named)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    results = [
        RankedDocument(index, scores[index], UNSET if request.return_documents is False else RankedText(texts[index])) for index in best
    ]
    await context.respond_json(Ranking(f"rerank-{context.request_id}", result.model, results, result.usage()), result.headers())


async def _compare(
    worker: Worker,
    context: RequestContext,
    request: ScoreRequest | RerankRequest,
    first: Sequence[tuple[str, str]],
    second: Sequence[tuple[str, str]],
) -> tuple[PooledTexts, list[float]]:
    """Return the score of each text of `second` with the only one of `first`, or with the one at the same index. Raise ApiError."""
    classifier = worker.ready.classifier
    if classifier is None:
        if request.use_activation is False:
            raise invalid("use_activation: only for models with a head; a cosine has no activation", param="use_activation")
        result = await compute(worker, context, request, [*first, *second], get_pooling(worker).kind)
        return result, await _compute_cosines(result.vectors[: len(first)], result.vectors[len(first) :])
    if len(classifier.labels) > 1:
        message = f"this model has {len(classifier.labels)} labels, and a score needs a model with one: use /classify"
        raise invalid(message, param="model", code="scores_not_served")
    pairs = [(name, Pair(first[index % len(first)][1], text)) for index, (name, text) in enumerate(second)]
    result, scores = await compute_scores(worker, context, request, pairs, request.use_activation)
    return result, [score for (score,) in scores]


def compute_cosines(left: "Sequence[array[float]]", right: "Sequence[array[float]]") -> list[float]:
    """Return the cosine of each pair of vectors of unit length; one vector in `left` goes with all of `right`.

    2,047 pairs of 1,024 values hold the interpreter's lock for 9 ms; Python's arithmetic held it for 64 ms.
    """
    import numpy as np  # saves 0.1 s of each worker start

    a, b = (np.stack([np.frombuffer(vector, np.float32) for vector in vectors]) for vectors in (left, right))
    scores: list[float] = np.einsum("ij,ij->i", np.broadcast_to(a, b.shape), b, dtype=np.float64).tolist()
    return scores


async def _compute_cosines(left: "Sequence[array[float]]", right: "Sequence[array[float]]") -> list[float]:
    """Call `compute_cosines`, in a thread for many values, so that the event loop is not blocked."""
    if sum(map(len, right)) <= INLINE_VALUES:
        return compute_cosines(left, right)
    return await asyncio.to_thread(compute_cosines, left, right)


def _find_side(request: ScoreRequest, names: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the name that the client uses for one side, and its texts with their names. Raise ApiError 400."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) > 1:
        raise invalid(f"{given[1]}: is another name of {given[0]}; give one of them", param=given[1])
    name = given[0] if given else names[0]
    texts: str | list[str] | None = getattr(request, name)
    if not texts:
        raise invalid(f"{name}: is missing or empty; give a text or a list of texts", param=name)
    return name, [(name, texts)] if isinstance(texts, str) else [(f"{name}[{index}]", text) for index, text in enumerate(texts)]
