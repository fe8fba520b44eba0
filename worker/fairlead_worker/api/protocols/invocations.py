"""`POST /invocations`, the only inference path of SageMaker: the fields of the body choose the API, as in vLLM."""

import msgspec

from fairlead_worker.api.errors import invalid
from fairlead_worker.api.http import Handler, RequestContext
from fairlead_worker.api.openai.chat import chat_completions
from fairlead_worker.api.openai.completions import completions
from fairlead_worker.api.pooling.classify import classify
from fairlead_worker.api.pooling.embeddings import embeddings
from fairlead_worker.api.pooling.similarity import SIDES, rerank, score
from fairlead_worker.api.schema import check_size
from fairlead_worker.api.worker import Worker
from fairlead_worker.ipc.messages import Ready


async def invocations(worker: Worker, context: RequestContext) -> None:
    """Handle one request."""
    body = await context.read_body(worker.config.limits.max_body_bytes)
    check_size(body, worker.max_model_len)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = {}
    handler = _find_handler(fields, worker.ready)
    context.replay_body(body)
    await handler(worker, context)


def _find_handler(fields: dict[str, msgspec.Raw], ready: Ready) -> Handler:
    """Return the handler of the API that has these fields, and that this model serves."""
    given = {name for name, value in fields.items() if bytes(value) != b"null"}
    if "messages" in given:
        return chat_completions if ready.generates else embeddings
    if "prompt" in given:
        return completions
    if "input" in given:
        return embeddings if ready.classifier is None else classify
    if "query" in given:
        return rerank
    if all(given.intersection(names) for names in SIDES):
        return score
    raise invalid(
        "body: give messages (a chat), prompt (a completion), input (embeddings or classes), query and documents, or text_1 and text_2"
    )
