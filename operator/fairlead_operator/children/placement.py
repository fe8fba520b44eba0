"""Nodes for workers. Other scheduling settings (selectors, priority, runtime class) are in `spec.podTemplate`."""

from fairlead_operator.api import InferenceService
from fairlead_operator.objects import Object

PRODUCT = "nvidia.com/gpu.product"  # set by NVIDIA's GPU feature discovery
TAINT = "nvidia.com/gpu"  # usual taint of GPU nodes, which keeps other pods away


def placement(service: InferenceService, gpus: int) -> Object:
    """Return parts of a PodSpec: a node affinity for `gpuType`, and for pods with GPUs a toleration of the usual taint of GPU nodes."""
    made: Object = {}
    if service.spec.resources.gpu_type is not None:
        term = {"matchExpressions": [{"key": PRODUCT, "operator": "In", "values": [service.spec.resources.gpu_type]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        made["affinity"] = {"nodeAffinity": required}
    if gpus:
        made["tolerations"] = [{"key": TAINT, "operator": "Exists", "effect": "NoSchedule"}]
    return made
