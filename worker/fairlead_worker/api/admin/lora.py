"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from fairlead_worker.api.errors import ApiError, invalid
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.schema import LoadLoraRequest, UnloadLoraRequest, parse
from fairlead_worker.api.worker import Worker

MAX_BYTES = 65536
"""Limit of the body, which has a name and a path."""


async def load_lora_adapter(worker: Worker, context: RequestContext) -> None:
    """Load an adapter. Answer 200 once requests may use it."""
    _check_allowed(worker)
    request = parse(await context.read_body(MAX_BYTES), LoadLoraRequest)
    if not request.lora_path:
        raise invalid("lora_path: is empty; give a folder, file:///path or hf://org/name", param="lora_path")
    await worker.adapters.load(request.lora_name, request.lora_path, bool(request.load_inplace))
    await _respond_text(context, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_lora_adapter(worker: Worker, context: RequestContext) -> None:
    """Unload an adapter. Answer 200 once no new request may use it; running ones finish with it."""
    _check_allowed(worker)
    request = parse(await context.read_body(MAX_BYTES), UnloadLoraRequest)
    await worker.adapters.unload(request.lora_name)
    await _respond_text(context, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _check_allowed(worker: Worker) -> None:
    if not worker.config.allow_runtime_lora_updating:
        message = (
            "adapter changes over HTTP are disabled: start the worker with FAIRLEAD_ALLOW_RUNTIME_LORA_UPDATING=true, "
            "or declare adapters with --lora-modules"
        )
        raise ApiError(403, message, type="permission_error", code="forbidden")
    worker.check_serving()


async def _respond_text(context: RequestContext, text: str) -> None:
    await context.respond(200, text.encode(), type="text/plain; charset=utf-8")
