"""`spec.model.cache`: the volume for downloaded weights, in the shapes of core Kubernetes volumes, and the types of S3 settings."""

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from fairlead_operator.api.fields import ObjectName, Part, Quantity, refuse, rule, rules

_ONE = "spec.model.cache needs exactly one of persistentVolumeClaim, hostPath and emptyDir: keep one of them"
_PREFETCH = (
    "spec.model.cache.prefetch needs persistentVolumeClaim, since a Job fills one volume for all workers: set it, or remove prefetch"
)
_PARENT = "spec.model.cache.hostPath.path must not contain '..': write the path of the folder itself"
DOWNLOADED = ("hf://", "s3://", "gs://")


class ClaimVolume(Part):
    """A PersistentVolumeClaim of the namespace."""

    claim_name: ObjectName = Field(description="Name of the claim, mounted read-write.")


class HostPathVolume(Part):
    """A folder of each node."""

    path: Annotated[
        str,
        Field(
            max_length=1024,
            pattern=r"^/[A-Za-z0-9._/-]+$",
            json_schema_extra=rules(rule("!self.split('/').exists(step, step == '..')", _PARENT)),
        ),
    ] = Field(description="Folder on each node that group 65532 can write to.")


class EmptyDirVolume(Part):
    """Storage of the pod, deleted with the pod."""

    size_limit: Quantity = Field(description="Most bytes that the folder may hold, such as 50Gi.")


class ModelCache(Part):
    """The volume for downloaded weights. One worker downloads a model into it while the other workers wait."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("[has(self.persistentVolumeClaim), has(self.hostPath), has(self.emptyDir)].filter(given, given).size() == 1", _ONE),
            rule("self.prefetch == 'Disabled' || has(self.persistentVolumeClaim)", _PREFETCH, path=".prefetch"),
        )
    )

    persistent_volume_claim: ClaimVolume | None = Field(None, description="A PersistentVolumeClaim of the namespace.")
    host_path: HostPathVolume | None = Field(None, description="A folder of each node.")
    empty_dir: EmptyDirVolume | None = Field(None, description="Storage of each pod, deleted with the pod.")
    prefetch: Literal["Disabled", "Enabled"] = Field(
        "Disabled", description="Enabled: a Job downloads the models into the claim at once, also with replicas 0."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [each for each in (self.persistent_volume_claim, self.host_path, self.empty_dir) if each is not None]
        refuse(len(given) != 1, f"{_ONE} (got {len(given)})")
        refuse(self.prefetch == "Enabled" and self.persistent_volume_claim is None, _PREFETCH)
        path = self.host_path.path if self.host_path is not None else ""
        refuse(".." in path.split("/"), f"{_PARENT} (got {path})")
        return self


Endpoint = Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s@]+$")]
Region = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9-]+$")]


def is_in_bucket(uri: str) -> bool:
    return uri.startswith("s3://")


def is_downloaded(uri: str) -> bool:
    return uri.startswith(DOWNLOADED)
