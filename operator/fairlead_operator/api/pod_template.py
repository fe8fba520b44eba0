"""Templates that are merged into the pods of workers, routers and the batch server."""

from typing import Annotated, Any

from pydantic import Field

from fairlead_operator.api.fields import Part


class PodMetadata(Part):
    """Additional labels and annotations of the pods."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(default_factory=dict, max_length=64, description="Added to the labels.")
    annotations: dict[str, Annotated[str, Field(max_length=4096)]] = Field(
        default_factory=dict, max_length=64, description="Added to the annotations."
    )


class PodTemplate(Part):
    """Pod settings without a field of their own here, such as tolerations, nodeSelector, volumes and sidecars."""

    metadata: PodMetadata = Field(default_factory=PodMetadata, description="Added to the pods' metadata.")
    spec: dict[str, Any] = Field(
        default_factory=dict,
        description="A PodSpec. Lists merge by name: containers (worker, router, batch, agent; initContainer engine), volumes, env.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True, "maxProperties": 64, "additionalProperties": False},
    )

    def to_manifest(self) -> dict[str, Any]:
        """Return what the manifest says, without defaults."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
