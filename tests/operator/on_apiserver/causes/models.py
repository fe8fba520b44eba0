"""Causes for which a worker does not load its model. The termination message is the real worker's: see worker_errors.py."""

from .case import Case, ended
from .row import Row

_OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.5 GiB"


def _failed(cause: str, reason: str, next_step: str, error: str) -> Row:
    """Return the row of a worker that ends with the message `error` of worker_errors.py. `WeightsReady` has the same reason."""

    def produce(case: Case) -> None:
        case.report(ended(f"fairlead-worker: {case.worker_errors.get(error)}"))

    return Row(cause, reason, next_step, produce, condition="WeightsReady")


def _run_out_of_memory(case: Case) -> None:
    case.report(ended(_OUT_OF_MEMORY))


MODELS = (
    _failed("The hub asks for a token", "HubUnauthorized", "put a token that may read it in the Secret of spec.model.secretRef", "private"),
    _failed("The model of the hub is gated", "HubForbidden", "Accept the model's terms on the hub", "gated"),
    _failed("The hub has no such model", "ModelNotFound", "Correct spec.model.uri or its revision", "absent"),
    _failed("The hub limits requests", "HubRateLimited", "give a token (spec.model.secretRef) and a shared cache", "limited"),
    _failed("The hub does not answer", "HubUnreachable", "Allow the pods to reach the hub (NetworkPolicy, proxy, DNS)", "away"),
    _failed(
        "The bucket refuses access",
        "StoreForbidden",
        "Let the key of spec.model.secretRef, or the pod's role, read that bucket and folder",
        "refused",
    ),
    _failed("The bucket asks for credentials", "StoreUnauthorized", "Name a Secret in spec.model.secretRef", "asked"),
    _failed("The folder of the model does not exist", "ModelNotFound", "Correct the path in spec.model.uri", "folder"),
    _failed("The cache is too small for the model", "DiskFull", "Keep the model on a larger volume (spec.model.cache)", "large"),
    _failed("The cache is not writable", "CacheNotWritable", "Let the worker's user write to the volume of spec.model.cache", "read-only"),
    _failed("transformers does not know the architecture", "ModelUnsupported", "Choose a model, dtype or quantization", "architecture"),
    _failed("Files of the model are missing", "WeightsInvalid", "Copy or download the model again", "incomplete"),
    _failed(
        "A file of the model is damaged",
        "WeightsInvalid",
        "Copy or download the model again: its files are incomplete or damaged",
        "damaged",
    ),
    _failed("`config.json` is damaged", "WeightsInvalid", "Copy or download the model again", "config"),
    _failed("`maxModelLen` is more than the model's own", "ModelUnsupported", "Lower spec.engine.maxModelLen, or remove it", "length"),
    _failed(
        "`quantization` is not possible on this node, or with this `dtype`",
        "ModelUnsupported",
        "Change spec.engine.quantization or spec.engine.dtype",
        "quantization",
    ),
    _failed("A LoRA adapter cannot be read", "AdapterLoadFailed", "Correct spec.model.adapters", "adapter"),
    Row(
        "The model does not fit into GPU memory",
        "GpuOutOfMemory",
        "Use more or larger GPUs (spec.engine.tensorParallel)",
        _run_out_of_memory,
        condition="WeightsReady",
    ),
)
