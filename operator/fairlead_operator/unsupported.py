"""What the API takes and this release cannot do: said at once, and nothing is changed, rather than pods that hold GPUs and crash."""

from fairlead_operator.api import InferenceService

REASON = "TensorParallelUnsupported"
MOST_GPUS = 8
"""Of one machine, as clouds and makers sell them nearly all: a pod that asks for more would wait for ever."""


def unsupported(service: InferenceService) -> str:
    """Why nothing is made of this spec; empty for one that can be served."""
    ranks = service.spec.engine.tensor_parallel
    if ranks > MOST_GPUS:
        return (
            f"spec.engine.tensorParallel is {ranks}, and a worker is one pod, whose GPUs are one node's: set it to {MOST_GPUS} or less. "
            "What runs stays as it is. (Over several nodes it would take LeaderWorkerSet, leaderworkerset.x-k8s.io/v1, which this "
            "operator does not use.)"
        )
    if ranks > 1 and service.spec.model.adapters:
        return (
            f"spec.engine.tensorParallel is {ranks}, and LoRA adapters are not served by models divided over GPUs: leave out "
            "spec.model.adapters, or set spec.engine.tensorParallel to 1. What runs stays as it is."
        )
    return ""
