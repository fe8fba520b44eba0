"""GPUs of worker pods, and the nodes that have them. Other scheduling settings are in `spec.podTemplate`."""

from fairlead_operator.api import InferenceService
from fairlead_operator.api.resources import AMD, NVIDIA
from fairlead_operator.objects import Object


def placement(service: InferenceService, gpus: int) -> Object:
    """Return parts of a PodSpec: a node affinity for `gpuType`, DRA claims, and tolerations of the usual taints of GPU nodes."""
    resources = service.spec.resources
    made: Object = {}
    if resources.gpu_type is not None:
        term = {"matchExpressions": [{"key": resources.product_label, "operator": "In", "values": [resources.gpu_type]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        made["affinity"] = {"nodeAffinity": required}
    if resources.resource_claims:
        made["resourceClaims"] = [one.model_dump(mode="json", by_alias=True) for one in resources.resource_claims]
    if gpus:
        made["tolerations"] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in _taints(service)]
    return made


def device_resources(service: InferenceService, gpus: int) -> Object:
    """Return the part of a container's `resources` that provides `gpus` GPUs: a claim for each template, or an extended resource."""
    resources = service.spec.resources
    if resources.resource_claims:
        return {"claims": [{"name": one.name} for one in resources.resource_claims]}
    devices = {resources.gpu_resource or NVIDIA: str(gpus)}
    return {"requests": devices, "limits": devices} if gpus else {}


def _taints(service: InferenceService) -> list[str]:
    """Return the keys of the taints that keep other pods away: the vendor's, and the resource name.

    The latter is the convention of Kubernetes' admission plugin ExtendedResourceToleration. A DRA claim does not name its vendor.
    """
    resources = service.spec.resources
    if resources.resource_claims:
        return [NVIDIA, AMD]
    name = resources.gpu_resource or NVIDIA
    vendor = f"{name.partition('/')[0]}/gpu"
    return sorted({vendor, name} if vendor in (NVIDIA, AMD) else {name})
