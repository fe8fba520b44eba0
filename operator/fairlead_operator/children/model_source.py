"""Where the weights come from: a model URI → the worker's `--model`, and the mounts and environment that it needs."""

from dataclasses import dataclass, field

from fairlead_operator.api import ServiceSpec
from fairlead_operator.children import Object

MODEL_MOUNT = "/mnt/model"
CACHE_MOUNT = "/var/cache/fairlead"


@dataclass(frozen=True)
class ModelSource:
    uri: str  # as given to --model
    volumes: list[Object] = field(default_factory=list)
    mounts: list[Object] = field(default_factory=list)
    env: list[Object] = field(default_factory=list)


def model_source(spec: ServiceSpec) -> ModelSource:
    """`hf://`: downloaded into the cache volume; `pvc://claim/path`: mounted read-only; `file://`: as it is."""
    model = spec.model
    scheme, _, rest = model.uri.partition("://")
    if scheme == "pvc":
        claim, _, path = rest.partition("/")
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        mount = {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True}
        uri = f"file://{MODEL_MOUNT}/{path.strip('/')}".rstrip("/")
        return ModelSource(uri, [volume], [mount])
    if scheme == "hf":
        uri = f"{model.uri}@{model.revision}" if model.revision else model.uri
        source: Object = {"persistentVolumeClaim": {"claimName": model.cache.claim}} if model.cache else {"emptyDir": {}}
        env: list[Object] = [{"name": "HF_HOME", "value": CACHE_MOUNT}]
        if model.secret_ref is not None:
            key = {"name": model.secret_ref.name, "key": model.secret_ref.key}
            env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
        return ModelSource(uri, [{"name": "cache", **source}], [{"name": "cache", "mountPath": CACHE_MOUNT}], env)
    return ModelSource(model.uri)
