"""What the API takes and this release cannot do: said at once, and nothing is changed, rather than pods that hold GPUs and crash."""

from fairlead_operator.api import InferenceService

REASON = "TensorParallelUnsupported"


def unsupported(service: InferenceService) -> str:
    """Why nothing is made of this spec; empty for one that can be served."""
    ranks = service.spec.engine.tensor_parallel
    if ranks == 1:
        return ""
    return (
        f"spec.engine.tensorParallel is {ranks}, and workers of this release run a model on one GPU: set it to 1. "
        "What runs stays as it is. (Over several pods it would also take LeaderWorkerSet, leaderworkerset.x-k8s.io/v1, which this "
        "operator does not use.)"
    )
