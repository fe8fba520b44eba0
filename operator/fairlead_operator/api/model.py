"""`spec.model`: the model, its LoRA adapters, and the volume for downloaded weights, in the shapes of core Kubernetes volumes."""

from typing import Annotated, Literal

from pydantic import Field

from fairlead_operator.api.fields import (
    MODEL_NAME,
    ObjectName,
    Part,
    Quantity,
    list_map,
    refuse,
    rule,
    ruled,
    rules,
    uri_schema,
    uri_validator,
)

_REVISION = "spec.model.revision needs an hf:// model without @REVISION in spec.model.uri: keep one of the two"
_SECRET = "spec.model.secretRef needs an hf:// model (token of the hub), or an s3:// or gs:// model (access key): remove it"
_CACHE = "spec.model.cache needs an hf://, s3:// or gs:// model, since other models are not downloaded: remove it"
_ENDPOINT = "spec.model.endpoint needs an hf://, s3:// or gs:// model: remove it"
_REGION = "spec.model.region needs an s3:// model: remove it"
_SAME_NAMES = "spec.model.adapters must not contain a name twice, since requests select by name: rename one adapter"
MODELS_NAME = "spec.model.adapters must not contain the name of the model, since requests select by name: rename the adapter"
_MAX_ADAPTERS = 64
_ONE = "spec.model.cache needs exactly one of persistentVolumeClaim, hostPath and emptyDir: keep one of them"
_PREFETCH = (
    "spec.model.cache.prefetch needs persistentVolumeClaim, since a Job fills one volume for all workers: set it, or remove prefetch"
)
_PARENT = "spec.model.cache.hostPath.path must not contain '..': write the path of the folder itself"
DOWNLOADED = ("hf://", "s3://", "gs://")
Endpoint = Annotated[str, Field(max_length=512, pattern=r"^https?://[^\s@]+$")]
Region = Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9-]+$")]


def is_in_bucket(uri: str) -> bool:
    return uri.startswith("s3://")


def is_downloaded(uri: str) -> bool:
    return uri.startswith(DOWNLOADED)


class Adapter(Part):
    """A LoRA adapter in the format of PEFT."""

    name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$")] = Field(
        description='Value of "model" in requests that use this adapter.'
    )
    uri: Annotated[str, uri_validator("spec.model.adapters.uri"), uri_schema("spec.model.adapters.uri")] = Field(
        description="Folder that holds adapter_config.json, in the forms of spec.model.uri."
    )


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

    model_config = ruled(
        rule("[has(self.persistentVolumeClaim), has(self.hostPath), has(self.emptyDir)].filter(given, given).size() == 1", _ONE),
        rule("self.prefetch == 'Disabled' || has(self.persistentVolumeClaim)", _PREFETCH, path=".prefetch"),
    )

    persistent_volume_claim: ClaimVolume | None = Field(None, description="A PersistentVolumeClaim of the namespace.")
    host_path: HostPathVolume | None = Field(None, description="A folder of each node.")
    empty_dir: EmptyDirVolume | None = Field(None, description="Storage of each pod, deleted with the pod.")
    prefetch: Literal["Disabled", "Enabled"] = Field(
        "Disabled", description="Enabled: a Job downloads the models into the claim at once, also with replicas 0."
    )

    def check_rules(self) -> None:
        given = [each for each in (self.persistent_volume_claim, self.host_path, self.empty_dir) if each is not None]
        refuse(len(given) != 1, f"{_ONE} (got {len(given)})")
        refuse(self.prefetch == "Enabled" and self.persistent_volume_claim is None, _PREFETCH)
        path = self.host_path.path if self.host_path is not None else ""
        refuse(".." in path.split("/"), f"{_PARENT} (got {path})")


class SecretKey(Part):
    """A Secret in the namespace of the service. The kubelet reads it; the operator never does."""

    name: ObjectName = Field(description="Name of the Secret.")
    key: str = Field(
        "token",
        min_length=1,
        max_length=253,
        pattern=r"^[-._a-zA-Z0-9]+$",
        description="Key of the hub's token (hf://), or of the key file (gs://).",
    )


class Model(Part):
    """The model to serve."""

    model_config = ruled(
        rule("!has(self.revision) || (self.uri.startsWith('hf://') && !self.uri.contains('@'))", _REVISION, path=".revision"),
        rule("!has(self.secretRef) || self.uri.matches('^(hf|s3|gs)://')", _SECRET, path=".secretRef"),
        rule("!has(self.cache) || self.uri.matches('^(hf|s3|gs)://')", _CACHE, path=".cache"),
        rule("!has(self.endpoint) || self.uri.matches('^(hf|s3|gs)://')", _ENDPOINT, path=".endpoint"),
        rule("!has(self.region) || self.uri.startsWith('s3://')", _REGION, path=".region"),
    )

    uri: Annotated[str, uri_validator("spec.model.uri"), uri_schema("spec.model.uri")] = Field(
        description="hf://ORG/NAME[/FILE.gguf][@REVISION], s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, pvc://CLAIM/PATH, "
        "oci://IMAGE[#FOLDER] or file:///PATH. FOLDER and PATH may name a .gguf file."
    )
    name: Annotated[str, Field(min_length=1, max_length=253, pattern=MODEL_NAME)] | None = Field(
        None, description='Value of "model" in requests. Absent: the name of the service.'
    )
    revision: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$")] | None = Field(
        None, description="Commit, tag or branch of an hf:// model."
    )
    secret_ref: SecretKey | None = Field(
        None,
        description="Token of the hub (hf://), AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3://), or key file (gs://). "
        "Absent: the pod's role.",
    )
    cache: ModelCache | None = Field(None, description="Volume for downloaded weights. Absent: each new pod downloads them again.")
    adapters: list[Adapter] = Field(
        default_factory=list,
        max_length=_MAX_ADAPTERS,
        description="LoRA adapters, loaded before a worker is ready. A change starts a rollout.",
        json_schema_extra=list_map("name"),
    )

    endpoint: Endpoint | None = Field(
        None, description="URL of an S3-compatible store or of a mirror of the hub. Absent: huggingface.co, AWS or Google Cloud."
    )
    region: Region | None = Field(None, description="Region of the bucket, such as eu-west-1. Absent: us-east-1.")

    def check_rules(self) -> None:
        hub = self.uri.startswith("hf://")
        refuse(self.endpoint is not None and not is_downloaded(self.uri), _ENDPOINT)
        refuse(self.region is not None and not is_in_bucket(self.uri), _REGION)
        refuse(self.revision is not None and (not hub or "@" in self.uri), _REVISION)
        refuse(self.secret_ref is not None and not is_downloaded(self.uri), _SECRET)
        refuse(self.cache is not None and not is_downloaded(self.uri), _CACHE)
        refuse(len({one.name for one in self.adapters}) < len(self.adapters), _SAME_NAMES)
        refuse(self.name in {one.name for one in self.adapters}, MODELS_NAME)
