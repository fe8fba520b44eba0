"""`POST /classify`: the label of each text, by a model with a head. Scores of rerankers use the same head."""

import math
from array import array
from collections.abc import Sequence

from fairlead_worker.api.answers.pooling import Classification, ClassificationList
from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.pooling.encode import Pair, PooledTexts, compute
from fairlead_worker.api.pooling.schema import ClassifyRequest
from fairlead_worker.api.schema import InferenceRequest, parse
from fairlead_worker.api.tokenize import TextOrTokens, list_texts
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import Activation, Classifier


async def classify(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    request = parse(await context.read_body(worker.config.limits.max_body_bytes), ClassifyRequest, worker.max_model_len)
    classifier = get_classifier(worker)
    result, scores = await compute_scores(worker, context, request, list_texts("input", request.input), request.use_activation)
    data = [
        Classification(index, classifier.labels[max(range(len(each)), key=each.__getitem__)], each, len(each))
        for index, each in enumerate(scores)
    ]
    answer = result.answer(ClassificationList, f"classify-{context.request_id}", data)
    await context.respond_json(answer, result.headers())


def get_classifier(worker: Worker) -> Classifier:
    """Return the model's head. Raise ApiError 400 if it has none."""
    if worker.ready.classifier is None:
        message = (
            "this model has no classification head (an architecture ...ForSequenceClassification): use /v1/embeddings, /score or /rerank"
        )
        raise invalid(message, param="model", code="classification_not_served")
    return worker.ready.classifier


async def compute_scores(
    worker: Worker,
    context: RequestContext,
    request: InferenceRequest,
    texts: Sequence[tuple[str, TextOrTokens | Pair]],
    use_activation: bool | None,
) -> tuple[PooledTexts, list[list[float]]]:
    """Return the texts with their logits, and the scores of the model's labels: logits if `use_activation` is False."""
    activation = "none" if use_activation is False else get_classifier(worker).activation
    result = await compute(worker, context, request, texts, "classify")
    return result, [activate(logits, activation) for logits in result.vectors]


def activate(logits: "array[float]", activation: Activation) -> list[float]:
    """Return the scores of one text's logits."""
    if activation == "softmax":
        powers = [math.exp(logit - max(logits)) for logit in logits]
        return [power / sum(powers) for power in powers]
    if activation == "sigmoid":
        return [0.5 * (1 + math.tanh(0.5 * logit)) for logit in logits]  # overflows for no logit
    return logits.tolist()
