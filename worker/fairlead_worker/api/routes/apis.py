"""All operations of the HTTP API, by API, and which of them each port serves."""

from collections.abc import Mapping
from typing import Literal

from fairlead_common.protocols.errors import MessagesError
from fairlead_common.protocols.messages import MessagesBody
from fairlead_common.protocols.model_list import AnthropicModel, AnthropicModelList, Model, ModelList
from fairlead_common.protocols.paths import (
    CHAT,
    CLASSIFICATIONS,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    INVOCATIONS,
    MESSAGES,
    POOLING,
    RERANKS,
    RESPONSES,
    SCORES,
)
from fairlead_common.protocols.responses import ResponsesBody
from fairlead_worker.api import tokenize
from fairlead_worker.api.admin import introspection, lora, schedule, state
from fairlead_worker.api.answers.completions import ChatCompletion, ChatCompletionChunk, Completion
from fairlead_worker.api.answers.messages import Message, MessageStreamEvent, MessageTokens
from fairlead_worker.api.answers.pooling import ClassificationList, EmbeddingList, PooledList, Ranking, ScoreList
from fairlead_worker.api.answers.responses import DeletedResponse, InputItemList, Response, ResponseStreamEvent
from fairlead_worker.api.answers.worker import (
    DroppedPages,
    Health,
    Load,
    Prompt,
    Readiness,
    ServerInfo,
    TokenizerInfo,
    Tokens,
    Version,
)
from fairlead_worker.api.openai import chat, completions
from fairlead_worker.api.pooling import classify, embeddings, similarity
from fairlead_worker.api.pooling.schema import ClassifyRequest, EmbeddingRequest, RerankRequest, ScoreRequest
from fairlead_worker.api.pooling.similarity import SIDES
from fairlead_worker.api.protocols import anthropic_messages, invocations, openai_responses, stored_responses
from fairlead_worker.api.routes.operation import TEXT, Operation
from fairlead_worker.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadLoraRequest,
    TokenizeRequest,
    UnloadLoraRequest,
)

Part = Literal["all", "inference", "admin"]
"""The set of paths that a port serves. Every port serves health checks and `version`."""
_STORED = f"{RESPONSES}/{{id}}"
_STORED_STATUSES = (404, 503)
_INVOCATIONS = (
    (ChatRequest, (("messages",),)),
    (CompletionRequest, (("prompt",),)),
    (EmbeddingRequest, (("input", "messages"),)),
    (RerankRequest, (("query",), ("documents",))),
    (ScoreRequest, SIDES),
)
"""Bodies with the fields by which `invocations` tells them apart."""
_LORA_STATUSES = (400, 403, 404, 413, 500, 503)


def _id(name: str, path: str) -> str:
    """Return `score` for `/score` and `score_v1` for `/v1/score`."""
    version = path.split("/")[1]
    return f"{name}_{version}" if version != name else name


_OPENAI = (
    Operation(
        *("POST", CHAT, "create_chat_completion", "Answer a chat", chat.chat_completions),
        answer=ChatCompletion,
        body=ChatRequest,
        required=("messages",),
        stream=ChatCompletionChunk,
    ),
    Operation(
        *("POST", COMPLETIONS, "create_completion", "Continue a text", completions.completions),
        answer=Completion,
        body=CompletionRequest,
        required=("prompt",),
        stream=Completion,
    ),
    Operation(
        *("POST", RESPONSES, "create_response", "Answer a text or items", openai_responses.responses),
        answer=Response,
        body=ResponsesBody,
        required=("input",),
        stream=ResponseStreamEvent,
    ),
    Operation(
        *("GET", _STORED, "get_response", "Return a stored response", stored_responses.get_response),
        answer=Response,
        statuses=_STORED_STATUSES,
    ),
    Operation(
        *("DELETE", _STORED, "delete_response", "Delete a stored response", stored_responses.delete_response),
        answer=DeletedResponse,
        statuses=_STORED_STATUSES,
    ),
    Operation(
        *("GET", f"{_STORED}/input_items", "list_input_items", "List the conversation before a stored response"),
        stored_responses.list_input_items,
        answer=InputItemList,
        statuses=_STORED_STATUSES,
    ),
    Operation(
        *("POST", f"{_STORED}/cancel", "cancel_response", "Always refused: no response runs in the background"),
        stored_responses.cancel_response,
        answer=Response,
        statuses=(400, *_STORED_STATUSES),
    ),
    Operation(
        *("POST", INVOCATIONS, "invoke", "Answer the body of any API, as SageMaker's containers do", invocations.invocations),
        alternatives=_INVOCATIONS,
    ),
    Operation("GET", "/v1/models", "list_models", "List the models and adapters", state.models, answer=ModelList | AnthropicModelList),
    Operation(
        *("GET", "/v1/models/{name:path}", "retrieve_model", "Describe a model or an adapter", state.model),
        answer=Model | AnthropicModel,
        statuses=(404,),
    ),
)
_ANTHROPIC = (
    Operation(
        *("POST", MESSAGES, "create_message", "Answer messages", anthropic_messages.messages),
        answer=Message,
        body=MessagesBody,
        required=("messages", "max_tokens"),
        stream=MessageStreamEvent,
        error=MessagesError,
    ),
    Operation(
        *("POST", COUNT_TOKENS, "count_message_tokens", "Count the tokens of messages", anthropic_messages.count_tokens),
        answer=MessageTokens,
        body=MessagesBody,
        required=("messages",),
        error=MessagesError,
    ),
)
_POOLING = (
    Operation(
        *("POST", EMBEDDINGS, "create_embedding", "Embed texts", embeddings.embeddings),
        answer=EmbeddingList,
        body=EmbeddingRequest,
    ),
    Operation(
        *("POST", POOLING, "create_pooling", "Embed texts, in vLLM's form", embeddings.embeddings),
        answer=PooledList,
        body=EmbeddingRequest,
    ),
    *(
        Operation(
            *("POST", path, _id("score", path), "Score pairs of texts", similarity.score),
            answer=ScoreList,
            body=ScoreRequest,
        )
        for path in SCORES
    ),
    *(
        Operation(
            *("POST", path, _id("rerank", path), "Rank documents by their similarity to a query", similarity.rerank),
            answer=Ranking,
            body=RerankRequest,
            required=("query", "documents"),
        )
        for path in RERANKS
    ),
    *(
        Operation(
            *("POST", path, _id("classify", path), "Classify texts", classify.classify),
            answer=ClassificationList,
            body=ClassifyRequest,
            required=("input",),
        )
        for path in CLASSIFICATIONS
    ),
)
_TOKENS = (
    Operation(
        *("POST", "/tokenize", "tokenize", "Convert a prompt or messages to token ids", tokenize.tokenize),
        answer=Tokens,
        body=TokenizeRequest,
    ),
    Operation(
        *("POST", "/detokenize", "detokenize", "Convert token ids to text", tokenize.detokenize), answer=Prompt, body=DetokenizeRequest
    ),
)
ADMIN = (
    Operation(
        *("POST", "/v1/load_lora_adapter", "load_lora_adapter", "Load a LoRA adapter", lora.load_lora_adapter),
        media_type=TEXT,
        body=LoadLoraRequest,
        statuses=_LORA_STATUSES,
    ),
    Operation(
        *("POST", "/v1/unload_lora_adapter", "unload_lora_adapter", "Unload a LoRA adapter", lora.unload_lora_adapter),
        media_type=TEXT,
        body=UnloadLoraRequest,
        statuses=_LORA_STATUSES,
    ),
    Operation("GET", "/load", "get_load", "Return the worker's load", state.load, answer=Load),
    Operation("GET", "/internal/prompt-format", "get_prompt_format", "Return how prompts become tokens", state.prompt_format),
    Operation(
        *("GET", "/internal/hot-prefixes/{tokens}", "list_hot_prefixes", "Return prefixes that a new worker should compute"),
        state.hot_prefixes,
        media_type="application/msgpack",
        statuses=(400, 401, 503),
    ),
    Operation(
        *("GET", "/internal/schedule", "get_schedule", "Return the last steps of --trace-schedule", schedule.schedule),
        media_type=TEXT,
        statuses=(404,),
    ),
    Operation("GET", "/metrics", "get_metrics", "Return metrics for Prometheus", state.metrics, media_type=TEXT),
    Operation(
        "GET", "/server_info", "get_server_info", "Return the version and the settings", introspection.server_info, answer=ServerInfo
    ),
    Operation(
        *("GET", "/tokenizer_info", "get_tokenizer_info", "Return the tokenizer's settings", introspection.tokenizer_info),
        answer=TokenizerInfo,
        statuses=(503,),
    ),
    Operation(
        *("POST", "/reset_prefix_cache", "reset_prefix_cache", "Drop cached KV that no request uses", introspection.reset_prefix_cache),
        answer=DroppedPages,
        statuses=(503,),
    ),
)
"""Operations of the admin port, for operators, routers and other workers."""
_EVERYWHERE = (
    Operation("GET", "/livez", "get_liveness", "Whether the engine is alive", state.liveness, answer=Health, refusal=503),
    Operation("GET", "/ping", "get_ping", "Whether the worker accepts requests", state.health, answer=Health, refusal=503),
    Operation("POST", "/ping", "post_ping", "Whether the worker accepts requests", state.health, answer=Health, refusal=503),
    Operation("GET", "/ready", "get_readiness", "Whether the worker serves requests", state.ready, answer=Readiness, refusal=503),
    Operation("GET", "/version", "get_version", "Return the release", state.version, answer=Version),
)
_HEALTH = Operation("GET", "/health", "get_health", "Whether the worker accepts requests", state.health, answer=Health, refusal=503)
_ADMIN_HEALTH = Operation("GET", "/health", "get_health", "Whether the engine is alive", state.liveness, answer=Health, refusal=503)
"""Of a port that serves only the admin paths: the kubelet probes it, also of pods that earlier releases rendered."""
_INFERENCE = {"OpenAI": _OPENAI, "Anthropic": _ANTHROPIC, "Pooling": _POOLING, "Tokens": _TOKENS}


def select_apis(part: Part) -> Mapping[str, tuple[Operation, ...]]:
    """Return the operations of a port, by the tag of their API."""
    found = _INFERENCE if part != "admin" else {}
    if part != "inference":
        found = found | {"Admin": ADMIN}
    return found | {"Health": (_ADMIN_HEALTH if part == "admin" else _HEALTH, *_EVERYWHERE)}
