"""On which nodes workers may run. Everything else of scheduling (selectors, priority, runtime class) goes through `spec.podTemplate`."""

from fairlead_operator.api import InferenceService
from fairlead_operator.objects import Object

PRODUCT = "nvidia.com/gpu.product"  # set by NVIDIA's GPU feature discovery
TAINT = "nvidia.com/gpu"  # what clusters keep their GPU nodes free of other pods with


def placement(service: InferenceService, gpus: int) -> Object:
    """Parts of a PodSpec: `gpuType` as node affinity, and for pods with GPUs the toleration of GPU nodes' usual taint."""
    made: Object = {}
    if service.spec.resources.gpu_type is not None:
        term = {"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": [service.spec.resources.gpu_type]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        made["affinity"] = {"nodeAffinity": required}
    if gpus:
        made["tolerations"] = [{"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}]
    return made
