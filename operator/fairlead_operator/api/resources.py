"""`spec.resources`: CPU, memory, and GPUs from a device plugin or from Dynamic Resource Allocation (DRA).

The fields follow vLLM's production stack (`requestGPU`, `requestGPUType`) and the `resourceClaims` of a PodSpec.
"""

from typing import Annotated

from pydantic import Field

from fairlead_operator.api.fields import ObjectName, Part, Quantity, list_map, refuse, rule, ruled

NVIDIA, AMD = "nvidia.com/gpu", "amd.com/gpu"
PRODUCT_LABELS = {"nvidia.com": "nvidia.com/gpu.product", "amd.com": "amd.com/gpu.product-name"}
"""Vendor of a resource name → the node label with the GPU's product, as GPU feature discovery and AMD's node labeller set it."""
MIG = "/mig-"

RESOURCE_NAME = (
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)+/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"  # of device plugins
)
_TWO_SOURCES = "spec.resources.gpuResource and spec.resources.resourceClaims both provide the GPUs: keep one of the two"
_NO_GPUS = "spec.resources.gpus is 0, so spec.resources.gpuResource and spec.resources.resourceClaims have no effect: remove them, or gpus"
_UNKNOWN_PRODUCT = (
    "spec.resources.gpuType is a node label of NVIDIA and AMD, and these GPUs come from another resource: "
    "remove it, and select nodes in spec.podTemplate"
)
MIG_PARALLEL = (
    "spec.engine.tensorParallel must be 1 with MIG slices (spec.resources.gpuResource), since they cannot exchange data: set it to 1, or "
    "use whole GPUs"
)


class ClaimTemplate(Part):
    """A ResourceClaimTemplate in the namespace of the service: each worker pod gets its own claim."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")] = Field(
        description="Name of the claim within the pod."
    )
    resource_claim_template_name: ObjectName = Field(description="Name of the ResourceClaimTemplate.")


class Resources(Part):
    """Resources of each worker pod."""

    model_config = ruled(
        rule("!has(self.gpuResource) || !has(self.resourceClaims)", _TWO_SOURCES, path=".gpuResource"),
        rule("!has(self.gpus) || self.gpus > 0 || !(has(self.gpuResource) || has(self.resourceClaims))", _NO_GPUS, path=".gpus"),
        rule(
            "!has(self.gpuType) || (!has(self.resourceClaims) && "
            "(!has(self.gpuResource) || self.gpuResource.matches('^(nvidia|amd)[.]com/')))",
            _UNKNOWN_PRODUCT,
            path=".gpuType",
        ),
    )

    gpus: Annotated[int, Field(ge=0, le=64)] | None = Field(
        None, description="GPUs of each worker pod. 0: CPUs. Absent: tensorParallel / nodes, times the operator's default (1)."
    )
    gpu_resource: Annotated[str, Field(min_length=3, max_length=317, pattern=RESOURCE_NAME)] | None = Field(
        None, description="Resource name of the device plugin, such as amd.com/gpu. Absent: nvidia.com/gpu."
    )
    resource_claims: list[ClaimTemplate] = Field(
        default_factory=list,
        max_length=8,
        description="DRA claims that provide the GPUs, one for each pod. gpus is the number of devices that they allocate.",
        json_schema_extra=list_map("name"),
    )
    cpu: Quantity | None = Field(None, description="CPU request of each worker, such as 8 or 500m. There is no limit.")
    memory: Quantity | None = Field(None, description="Memory request and limit of each worker, such as 64Gi.")
    gpu_type: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")] | None = Field(
        None, description="Node label nvidia.com/gpu.product or amd.com/gpu.product-name. Absent: any GPU."
    )

    def check_rules(self) -> None:
        named = self.gpu_resource is not None or bool(self.resource_claims)
        refuse(self.gpu_resource is not None and bool(self.resource_claims), f"{_TWO_SOURCES} (gpuResource is {self.gpu_resource})")
        refuse(self.gpus == 0 and named, _NO_GPUS)
        refuse(self.gpu_type is not None and self.product_label is None, f"{_UNKNOWN_PRODUCT} (got {self.gpu_type})")

    @property
    def is_explicit(self) -> bool:
        """Return whether the manifest says where GPUs come from, so that the operator's default of 0 does not apply."""
        return self.gpu_resource is not None or bool(self.resource_claims)

    @property
    def product_label(self) -> str | None:
        """Return the node label that `gpuType` selects; None: there is none for these GPUs."""
        return None if self.resource_claims else PRODUCT_LABELS.get((self.gpu_resource or NVIDIA).partition("/")[0])

    @property
    def uses_mig(self) -> bool:
        return MIG in (self.gpu_resource or "")
