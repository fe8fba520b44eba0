"""Causes of a worker that cannot fetch, read or hold its model, from its termination message (worker/fairlead_worker/errors.py)."""

import re

from fairlead_operator.causes.cause import Cause, make_cause

_LOAD_FAILURE = re.compile(
    r"cannot load (?:model|LoRA adapter)|CUDA out of memory|OutOfMemoryError|No space left on device|Errno 28\b|Errno 122\b"
)
OF_WORKERS = ("CacheNotWritable", "GpuOutOfMemory", "WeightsInvalid", "ModelUnsupported", "AdapterLoadFailed", "ModelLoadFailed")
"""Reasons that depend on the worker's code or user, and not only on the model and its store."""
_TOKEN = "in the Secret of spec.model.secretRef (kubectl create secret generic hub --from-literal=token=…)"

# Pattern → reason and advice. The order matters: the hub answers 401 both for a private repository and for one that does not exist.
_KINDS = (
    (
        r"No space left|Errno 28\b|Errno 122\b|disk quota|is full \(|are still to be downloaded, and ",
        "DiskFull",
        "Keep the model on a larger volume (spec.model.cache), or free disk on the node.",
    ),
    (
        r"may not be written by|, which cannot be written",
        "CacheNotWritable",
        "Let the worker's user write to the volume of spec.model.cache (fsGroup, or the path's owner on the node).",
    ),
    (r"the store refuses access", "StoreForbidden", "Let the key of spec.model.secretRef, or the pod's role, read that bucket and folder."),
    (
        r"the store asks for credentials|there are no credentials|the credentials cannot be used",
        "StoreUnauthorized",
        "Name a Secret in spec.model.secretRef (s3://: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; gs://: the key file of a service "
        "account), or give the pod a role.",
    ),
    (
        r"no such bucket|no model file in that folder",
        "ModelNotFound",
        "Correct the bucket and folder in spec.model.uri, and spec.model.endpoint.",
    ),
    (
        r"the store answered|the bucket cannot be reached",
        "StoreUnreachable",
        "See whether the pods reach the store: spec.model.endpoint, NetworkPolicy, DNS.",
    ),
    (r"gated|\(403\)|answered 403", "HubForbidden", f"Accept the model's terms on the hub with the account whose token is {_TOKEN}."),
    (
        r"\(401\)|answered 401|[Ii]nvalid (?:credentials|token)",
        "HubUnauthorized",
        f"Check spec.model.uri, and put a token that may read it {_TOKEN}.",
    ),
    (r"\(404\)|answered 404|no revision", "ModelNotFound", "Correct spec.model.uri or its revision."),
    (r"answered 429|rate limit", "HubRateLimited", "Wait, or give a token (spec.model.secretRef) and a shared cache (spec.model.cache)."),
    (r"answered 5\d\d", "HubUnreachable", "The hub fails: the worker retries automatically."),
    (
        r"hub cannot be reached|Name or service not known|Temporary failure in name resolution|Connection (?:refused|reset)|[Tt]imed out",
        "HubUnreachable",
        "Allow the pods to reach the hub (NetworkPolicy, proxy, DNS), or serve the model from a volume (pvc://CLAIM/PATH).",
    ),
    (r"--max-model-len \d+ is more", "ModelUnsupported", "Lower spec.engine.maxModelLen, or remove it: the model's own limit then counts."),
    (r"cannot load LoRA adapter", "AdapterLoadFailed", "Correct spec.model.adapters: the URI, the adapter's base model, its rank."),
    (
        r"there is no /|is not a folder|no config\.json|GGUF models in /",
        "ModelNotFound",
        "Correct the path in spec.model.uri: it names the folder that holds config.json, or a .gguf file.",
    ),
    (
        r"CUDA out of memory|OutOfMemoryError|not enough (?:GPU )?memory|does not fit",
        "GpuOutOfMemory",
        "Use more or larger GPUs (spec.engine.tensorParallel), a smaller model, or less KV cache (spec.engine.kvCache.size).",
    ),
    (
        r"missing weights|weights (?:of \S+ )?cannot be loaded|cannot be read: |its tokenizer cannot be loaded|is not a valid "
        r"|convert (?:it|the model) again|no GGUF file|is not beside it|model\.safetensors",
        "WeightsInvalid",
        "Copy or download the model again: its files are incomplete or damaged.",
    ),
    (
        r"--quantization ",
        "ModelUnsupported",
        "Change spec.engine.quantization or spec.engine.dtype: docs/guides/weights.md lists the supported combinations.",
    ),
    (
        r"unsupported|not supported|quantized",
        "ModelUnsupported",
        "Choose a model, dtype or quantization that is supported (docs/guides/weights.md).",
    ),
)


def find_cause(pod: str, message: str) -> Cause | None:
    """Return the cause; None where the message is not about loading a model."""
    if not _LOAD_FAILURE.search(message):
        return None
    for pattern, reason, do in _KINDS:
        if re.search(pattern, message):
            return make_cause(reason, f"pod {pod}: {message}", do, weights=True)
    return make_cause("ModelLoadFailed", f"pod {pod}: {message}", f"See kubectl logs {pod} --previous.", weights=True)
