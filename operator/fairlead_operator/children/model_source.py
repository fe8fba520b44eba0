"""Model URIs for `--model`, `--lora-modules` and `--speculative-config`, and the mounts and environment that they need."""

from dataclasses import dataclass, field

from fairlead_operator.api import ServiceSpec
from fairlead_operator.api.model import Model, ModelCache, is_downloaded
from fairlead_operator.children.pods import Mounted, secret_variable
from fairlead_operator.objects import Object

MODEL_MOUNT = "/mnt/model"
DRAFT_MOUNT = "/mnt/draft"
ADAPTERS_MOUNT = "/mnt/adapters"
CACHE_MOUNT = "/var/cache/fairlead"
SECRET_VARIABLES = {"hf": "HF_TOKEN", "gs": "GOOGLE_SERVICE_ACCOUNT_KEY"}
ENDPOINT_VARIABLES = {"hf": "HF_ENDPOINT", "s3": "AWS_ENDPOINT_URL", "gs": "GOOGLE_BASE_URL"}


@dataclass
class ModelSource:
    uri: str  # as given to --model
    draft: str = ""  # model of --speculative-config
    adapters: dict[str, str] = field(default_factory=dict)  # name → URI, as given to --lora-modules
    mounted: list[Mounted] = field(default_factory=list)
    env: list[Object] = field(default_factory=list)


def model_source(spec: ServiceSpec, commit: str = "") -> ModelSource:
    """Return the source of the models of `spec`.

    `hf://`, `s3://` and `gs://` are downloaded into the cache volume. `pvc://claim/path` and `oci://image` are mounted read-only.
    `file://` is used unchanged. `commit`: to which an `hf://` model without one was resolved; empty: the worker resolves it.
    """
    model = spec.model
    speculation = spec.engine.speculative_decoding
    draft = (speculation.draft_model_uri or "") if speculation is not None else ""
    revision = commit or model.revision
    found = ModelSource(f"{model.uri.partition('@')[0] if commit else model.uri}@{revision}" if revision else model.uri, draft)
    if any(is_downloaded(uri) for uri in (model.uri, draft, *(one.uri for one in model.adapters))):
        found.mounted.append(Mounted("cache", CACHE_MOUNT, cache_volume(model.cache), read_only=False))
        found.env += [{"name": "HF_HOME", "value": CACHE_MOUNT}, {"name": "FAIRLEAD_MODEL_CACHE", "value": CACHE_MOUNT}]
    found.env += _access_variables(model)
    found.uri = _mount_source(found, "model", found.uri, MODEL_MOUNT)
    found.draft = _mount_source(found, "draft", draft, DRAFT_MOUNT)
    for number, adapter in enumerate(model.adapters):
        found.adapters[adapter.name] = _mount_source(found, f"adapter-{number}", adapter.uri, f"{ADAPTERS_MOUNT}/{number}")
    return found


def cache_volume(cache: ModelCache | None) -> Object:
    """Return the volume source for downloads."""
    if cache is None:
        return {"emptyDir": {}}
    if cache.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": cache.persistent_volume_claim.claim_name}}
    if cache.host_path is not None:
        # Not DirectoryOrCreate: a folder that the kubelet creates belongs to root, and the pod could not write to it.
        return {"hostPath": {"path": cache.host_path.path, "type": "Directory"}}
    return {"emptyDir": {"sizeLimit": cache.empty_dir.size_limit} if cache.empty_dir is not None else {}}


def _access_variables(model: Model) -> list[Object]:
    """Return endpoint, region and credentials of the model's source as variables. The kubelet resolves the Secret."""
    scheme, secret = model.uri.partition("://")[0], model.secret_ref
    made: list[Object] = []
    if secret is not None and scheme == "s3":
        made += [secret_variable(key, secret.name, key) for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
        made.append(secret_variable("AWS_SESSION_TOKEN", secret.name, "AWS_SESSION_TOKEN", optional=True))
    elif secret is not None:
        made.append(secret_variable(SECRET_VARIABLES[scheme], secret.name, secret.key))
    if model.endpoint is not None:
        made.append({"name": ENDPOINT_VARIABLES[scheme], "value": model.endpoint})
    if model.region is not None:
        made.append({"name": "AWS_REGION", "value": model.region})
    return made


def _mount_source(found: ModelSource, name: str, uri: str, mount: str) -> str:
    """Mount the claim of a `pvc://` URI or the image of an `oci://` URI, and return its `file://` URI. Return other URIs unchanged."""
    scheme, _, rest = uri.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        found.mounted.append(Mounted(name, mount, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}))
    elif scheme == "oci":
        image, _, path = rest.partition("#")
        found.mounted.append(Mounted(name, mount, {"image": {"reference": image, "pullPolicy": "IfNotPresent"}}))
    else:
        return uri
    return f"file://{mount}/{path.strip('/')}".rstrip("/")
