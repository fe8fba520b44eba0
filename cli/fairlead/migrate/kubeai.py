"""KubeAI: Model, and the resource profiles of its Helm values."""

from collections.abc import Mapping
from typing import Any

from fairlead.migrate.command_line import read_arguments
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, show, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_env, read_resources
from fairlead.migrate.sources import METADATA_REASONS, Context, Source, is_kind
from fairlead.migrate.tables import Field, apply
from fairlead_operator.api.resources import PRODUCT_LABELS

NO_LIMIT = 10
"""Most workers of a Model without maxReplicas, which KubeAI does not limit."""
_GPU = {"requests": {"nvidia.com/gpu": 1}}
_L4 = {"requests": {"nvidia.com/gpu": 1, "cpu": 6, "memory": "24Gi"}}
_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"requests": {"cpu": 1, "memory": "2Gi"}},
    "nvidia-gpu-l4": _L4,
    "nvidia-gpu-l40s": _L4,
    "nvidia-": _GPU,
    "amd-": {"requests": {"amd.com/gpu": 1}},
    "google-tpu": {"requests": {"google.com/tpu": 1}},
}
"""Resources of KubeAI's own profiles, for one unit, by the beginning of their name."""
_STRATEGIES = {"LeastLoad": "LeastLoad", "PrefixHash": "PrefixAware"}

MODEL = (
    Field("spec.url", "model.uri", str),
    Field("spec.image", "engine.image", str),
    Field("spec.loadBalancing.strategy", "routing.policy", _STRATEGIES.__getitem__),
    Field("spec.priorityClassName", lambda draft, value, source: draft.pod.update(priorityClassName=value)),
)
_AUTOMATIC = "spec.scaling.target replaces it: nothing to do"
_REASONS = {
    **METADATA_REASONS,
    "spec.owner": "deprecated, and without effect on serving: nothing to do",
    "spec.features": "the engine serves what its model can: nothing to do for text generation",
    "spec.cacheProfile": "create a PersistentVolumeClaim (ReadWriteMany) and name it in spec.model.cache.persistentVolumeClaim",
    "spec.files": "put the files into a ConfigMap, and mount it with spec.podTemplate (volumes, and initContainers engine)",
    "spec.loadBalancing.prefixHash": "PrefixAware follows the engines' real caches: nothing to do",
    "spec.targetRequests": _AUTOMATIC,
    "spec.replicas": _AUTOMATIC,
    "spec.minReplicas": _AUTOMATIC,
    "spec.maxReplicas": _AUTOMATIC,
}


def _convert(fields: Fields, context: Context) -> list[Draft]:
    draft = Draft()
    draft.identify(fields.look("metadata", {}))
    name = draft.served_name = fields.look("metadata.name")
    if (engine := fields.take("spec.engine", "VLLM")) != "VLLM":
        raise NotMigratable(f"spec.engine {show(engine)}: only VLLM can be migrated: for another model serve its safetensors with vLLM")
    apply(MODEL, fields, draft)
    if fields.look("spec.features") == ["TextGeneration"]:
        fields.take("spec.features")
    for adapter in fields.items("spec.adapters"):
        short = str(adapter.take("name") or adapter.take("id"))
        draft.adapters.append((f"{name}_{short}", str(adapter.take("url")), adapter.path))  # the name that KubeAI's clients send
    env = [{"name": key, "value": value} for key, value in fields.take("spec.env", {}).items()]
    read_env(draft, [Fields(one, "spec.env") for one in env])
    if sources := fields.take("spec.envFrom"):
        draft.container["envFrom"] = sources
        draft.note("spec.envFrom", "if it holds the hub's token, name that Secret in spec.model.secretRef too: the agent needs it")
    read_arguments(draft, fields.take("spec.args", []), "spec.args")
    if profile := fields.take("spec.resourceProfile"):
        _read_profile(draft, str(profile), context)
    _scale(draft, fields)
    finish(draft)
    return [draft]


def _read_profile(draft: Draft, text: str, context: Context) -> None:
    """Read a profile `NAME:COUNT`: of the input's Helm values, or one of KubeAI's own."""
    name, _, count = text.partition(":")
    if not (count or "1").isdigit():
        raise NotMigratable(f"spec.resourceProfile {text!r} must be NAME:COUNT: correct it")
    own: Mapping[str, Any] = next((one for start, one in _PROFILES.items() if name.startswith(start)), {})
    given: Mapping[str, Any] = {}
    for values in context.objects:
        given = (values.get("resourceProfiles") or {}).get(name) or given
    profile = {"requests": {**own.get("requests", {}), **(given.get("requests") or {})}, "limits": dict(given.get("limits") or {})}
    if not (profile["requests"] or profile["limits"]):
        draft.note("spec.resourceProfile", "not one of KubeAI's: give its values to -f too, or set spec.resources", text)
    units = int(count or 1)
    for part in profile.values():
        part.update({key: _times(value, units) for key, value in part.items()})
    read_resources(draft, Fields(profile, "spec.resourceProfile"))
    for key in ("nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName"):
        if given.get(key):
            draft.pod[key] = given[key]
    if "gpu" in name:
        label = PRODUCT_LABELS["amd.com" if name.startswith("amd") else "nvidia.com"]
        draft.note("spec.resourceProfile", f"to require this GPU, set spec.resources.gpuType to the nodes' label {label}", text)


def _times(value: Any, count: int) -> Any:
    """Return a quantity `count` times: of a profile's unit."""
    text = str(value)
    digits = text.rstrip("mkKMGTPEi")
    number = float(digits) * count
    return f"{number:g}{text[len(digits) :]}" if digits != text else number if number % 1 else int(number)


def _scale(draft: Draft, fields: Fields) -> None:
    if fields.take("spec.autoscalingDisabled"):
        draft.put("replicas", whole(fields.take("spec.replicas", 1)), "spec.replicas")
        return
    fewest, most = whole(fields.take("spec.minReplicas", 0)), fields.take("spec.maxReplicas")
    if most is None:
        most = max(NO_LIMIT, fewest)
        draft.note("spec.maxReplicas", f"absent, so KubeAI has no limit: spec.scaling.maxReplicas is {most}, choose yours")
    target = fields.take("spec.targetRequests", 100)
    draft.autoscale((fewest, whole(most)), "spec.minReplicas", f"it scaled to spec.targetRequests {target} requests for each pod")
    if (delay := fields.take("spec.scaleDownDelaySeconds")) is not None and draft.get("scaling"):
        draft.put("scaling.scaleDown.stabilizationWindowSeconds", whole(delay), "spec.scaleDownDelaySeconds")


SOURCES = (Source("Model of KubeAI", is_kind("kubeai.org", "Model"), _convert, _REASONS),)
