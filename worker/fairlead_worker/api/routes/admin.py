"""Operations of the admin port, for operators, routers and other workers."""

from fairlead_worker.api.admin import introspection, lora, schedule, state
from fairlead_worker.api.answers.worker import DroppedPages, Load, ServerInfo, TokenizerInfo
from fairlead_worker.api.routes.operation import TEXT, Operation
from fairlead_worker.api.schema import LoadLoraRequest, UnloadLoraRequest

TAG = "Admin"
_LORA_STATUSES = (400, 403, 404, 413, 500, 503)
OPERATIONS = (
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
