"""Where the weights come from: model URIs → `--model` and `--speculative-model`, and the mounts and environment that they need."""

from dataclasses import dataclass, field

from fairlead_operator.api import ServiceSpec
from fairlead_operator.children import Object

MODEL_MOUNT = "/mnt/model"
DRAFT_MOUNT = "/mnt/draft"
ADAPTERS_MOUNT = "/mnt/adapters"
CACHE_MOUNT = "/var/cache/fairlead"


@dataclass
class ModelSource:
    uri: str  # as given to --model
    draft: str = ""  # as given to --speculative-model
    adapters: dict[str, str] = field(default_factory=dict)  # name → URI, as given to --lora
    volumes: list[Object] = field(default_factory=list)
    mounts: list[Object] = field(default_factory=list)
    env: list[Object] = field(default_factory=list)

    def mount(self, name: str, path: str, source: Object, **more: object) -> None:
        self.volumes.append({"name": name, **source})
        self.mounts.append({"name": name, "mountPath": path, **more})


def model_source(spec: ServiceSpec) -> ModelSource:
    """`hf://`: downloaded into the cache volume; `pvc://claim/path`: mounted read-only; `file://`: as it is."""
    model = spec.model
    drafting = spec.engine.speculative
    draft = (drafting.model or "") if drafting is not None else ""
    found = ModelSource(f"{model.uri}@{model.revision}" if model.revision else model.uri, draft)
    if any(uri.startswith("hf://") for uri in (model.uri, draft, *(one.uri for one in model.adapters))):
        source: Object = {"persistentVolumeClaim": {"claimName": model.cache.claim}} if model.cache else {"emptyDir": {}}
        found.mount("cache", CACHE_MOUNT, source)
        found.env.append({"name": "HF_HOME", "value": CACHE_MOUNT})
    if model.secret_ref is not None:
        key = {"name": model.secret_ref.name, "key": model.secret_ref.key}
        found.env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    found.uri = _claimed(found, "model", found.uri, MODEL_MOUNT)
    found.draft = _claimed(found, "draft", draft, DRAFT_MOUNT)
    for number, adapter in enumerate(model.adapters):
        found.adapters[adapter.name] = _claimed(found, f"adapter-{number}", adapter.uri, f"{ADAPTERS_MOUNT}/{number}")
    return found


def _claimed(found: ModelSource, name: str, uri: str, mount: str) -> str:
    """Mounts the claim of a `pvc://` URI and says where it is then; another URI is as it was."""
    if not uri.startswith("pvc://"):
        return uri
    claim, _, path = uri.removeprefix("pvc://").partition("/")
    found.mount(name, mount, {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}, readOnly=True)
    return f"file://{mount}/{path.strip('/')}".rstrip("/")
