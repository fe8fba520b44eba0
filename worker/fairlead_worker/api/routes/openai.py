"""OpenAI's APIs: completions, chat completions, responses, models."""

from fairlead_common.protocols.paths import CHAT, COMPLETIONS, RESPONSES
from fairlead_common.protocols.responses import ResponsesBody
from fairlead_worker.api.admin import state
from fairlead_worker.api.openai import chat, completions
from fairlead_worker.api.protocols import openai_responses
from fairlead_worker.api.routes.answers.completions import ChatCompletion, ChatCompletionChunk, Completion, Model, ModelList
from fairlead_worker.api.routes.answers.responses import Response, ResponseStreamEvent
from fairlead_worker.api.routes.operation import Operation
from fairlead_worker.api.schema import ChatRequest, CompletionRequest

TAG = "OpenAI"
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
    Operation("GET", "/v1/models", "list_models", "List the models and adapters", state.models, answer=ModelList),
    Operation(
        *("GET", "/v1/models/{name:path}", "retrieve_model", "Describe a model or an adapter", state.model), answer=Model, statuses=(404,)
    ),
)
