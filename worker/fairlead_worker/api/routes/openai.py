"""OpenAI's APIs: completions, chat completions, responses, models. SageMaker's path takes the body of any API."""

from fairlead_common.protocols.model_list import AnthropicModel, AnthropicModelList, Model, ModelList
from fairlead_common.protocols.paths import CHAT, COMPLETIONS, INVOCATIONS, RESPONSES
from fairlead_common.protocols.responses import ResponsesBody
from fairlead_worker.api.admin import state
from fairlead_worker.api.answers.completions import ChatCompletion, ChatCompletionChunk, Completion
from fairlead_worker.api.answers.responses import DeletedResponse, InputItemList, Response, ResponseStreamEvent
from fairlead_worker.api.openai import chat, completions
from fairlead_worker.api.pooling.schema import EmbeddingRequest, RerankRequest, ScoreRequest
from fairlead_worker.api.pooling.similarity import SIDES
from fairlead_worker.api.protocols import invocations, openai_responses, stored_responses
from fairlead_worker.api.routes.operation import Operation
from fairlead_worker.api.schema import ChatRequest, CompletionRequest

TAG = "OpenAI"
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
OPERATIONS = (
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
