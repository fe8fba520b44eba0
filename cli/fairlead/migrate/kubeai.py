"""KubeAI: Model, with the resource profiles of its chart. A Model becomes the pod that KubeAI makes of it."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from fairlead.migrate.command_line import read_arguments
from fairlead.migrate.context import Context
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import NO_FIELD, Fields, NotMigratable, reasons, show, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_container, read_env, read_pod, read_resources
from fairlead_operator.api.resources import PRODUCT_LABELS

_NO_LIMIT = 10
_GPU_PROFILE = re.compile(r"(nvidia|amd)-gpu-(t4|l4|l40s|h100|gh200|a100-[48]0gb|a16|rtx4070-8gb|mi300x)")
_PARTS = ("imageName", "requests", "limits", "nodeSelector", "affinity", "tolerations", "schedulerName", "runtimeClassName")
_POLICIES = {"LeastLoad": "LeastLoad", "PrefixHash": "PrefixAware"}


def convert_model(fields: Fields, context: Context) -> Draft:
    """Return the draft of a Model. Raises NotMigratable."""
    if (engine := fields.take("spec.engine")) != "VLLM":
        raise NotMigratable(f"spec.engine {show(engine)}: only VLLM can be migrated: serve the model's safetensors with it")
    draft = Draft(served_name=fields.look("metadata.name"))
    draft.identify(fields)
    draft.put("model.uri", fields.need("spec.url").rstrip("/"), "spec.url")
    for adapter in fields.items("spec.adapters"):  # clients send the name MODEL_ADAPTER
        draft.adapters.append((f"{draft.served_name}_{adapter.need('name')}", adapter.need("url"), adapter.path))
    if strategy := fields.take("spec.loadBalancing.strategy"):
        draft.put("routing.policy", _POLICIES[strategy], "spec.loadBalancing.strategy")
    if fields.look("spec.features") == ["TextGeneration"]:
        fields.take("spec.features")
    read_env(draft, [Fields({"name": name, "value": value}, "spec.env") for name, value in fields.take("spec.env", {}).items()])
    profile = _read_profile(draft, fields, context)
    read_resources(draft, Fields(profile.pop("resources"), "spec.resourceProfile"))
    own = {name: value for name in ("image", "envFrom", "priorityClassName") if (value := fields.look(f"spec.{name}"))}
    pod = Fields(profile | own, "spec", fields.used)
    read_pod(draft, pod, "")
    read_container(draft, pod, pod)
    if not draft.get("model.secretRef") and not draft.get("model.uri").startswith("pvc://"):
        draft.note("spec.url", "KubeAI's pods have the chart's token of the hub and keys of buckets: name yours in spec.model.secretRef")
    read_arguments(draft, fields.words("spec.args"), "spec.args")
    _scale(draft, fields)
    finish(draft)
    return draft


def _read_profile(draft: Draft, fields: Fields, context: Context) -> dict[str, Any]:
    """Return a profile `NAME:COUNT` as parts of a pod: the chart's own, with what Helm values of the input change."""
    text = str(fields.take("spec.resourceProfile"))
    if (match := re.fullmatch(r"([^:]+):(0*[1-9]\d*)", text)) is None:
        raise NotMigratable(f"spec.resourceProfile {text!r} must be NAME:COUNT, with 1 unit or more: write it")
    name, count, images = match[1], int(match[2]), dict[str, str]()
    profile = _own_profile(name)
    for number, values in enumerate(context.objects):
        if "kind" not in values and "resourceProfiles" in values:
            context.used.add(number)
            given = Fields(values).part("resourceProfiles").part(name).data
            profile |= {key: {**profile.get(key, {}), **value} if isinstance(value, Mapping) else value for key, value in given.items()}
            images |= Fields(values).part("modelServers.VLLM.images").data
    if not profile:
        raise NotMigratable(f"spec.resourceProfile {text!r} is not of KubeAI's chart: give the chart's values with it (-f values.yaml)")
    for key in sorted(profile.keys() - set(_PARTS)):
        draft.note(f"resourceProfiles.{name}.{key}", NO_FIELD, profile[key])
    if "gpu" in name and "nodeSelector" not in profile:
        label = PRODUCT_LABELS["amd.com" if name.startswith("amd") else "nvidia.com"]
        draft.note("spec.resourceProfile", f"to require this GPU, set spec.resources.gpuType to the nodes' label {label}", text)
    parts = {kind: {key: _times(value, count) for key, value in profile.get(kind, {}).items()} for kind in ("requests", "limits")}
    image = images.get(profile.get("imageName", ""), images.get("default", ""))
    return {key: profile[key] for key in _PARTS[3:] if key in profile} | {"resources": parts} | ({"image": image} if image else {})


def _own_profile(name: str) -> dict[str, Any]:
    """Return a profile of KubeAI's chart (0.22), for one unit."""
    if name == "cpu":
        return {"imageName": "cpu", "requests": {"cpu": 1, "memory": "2Gi"}}
    if (match := _GPU_PROFILE.fullmatch(name)) is None:
        return {}
    resource = f"{match[1]}.com/gpu"
    profile: dict[str, Any] = {"imageName": "gh200" if match[2] == "gh200" else f"{match[1]}-gpu", "limits": {resource: 1}}
    if match[2] != "t4":
        profile["tolerations"] = [{"key": resource, "operator": "Equal", "value": "present", "effect": "NoSchedule"}]
    return profile | ({"requests": {"cpu": 6, "memory": "24Gi"}} if match[2] in ("l4", "l40s") else {})


def _times(value: Any, count: int) -> str:
    """Return a quantity `count` times."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([eE][+-]?\d+|\D*)", str(value))) is None:
        raise ValueError(value)
    return f"{Decimal(match[1]) * count:f}{match[2]}"


def _scale(draft: Draft, fields: Fields) -> None:
    if fields.take("spec.autoscalingDisabled"):
        draft.put("replicas", whole(fields.take("spec.replicas", 0)), "spec.replicas")
        return
    fewest = whole(fields.take("spec.minReplicas", 0))
    if (most := fields.take("spec.maxReplicas")) is None:
        most = max(_NO_LIMIT, fewest + 1)
        draft.note("spec.maxReplicas", f"absent, so KubeAI has no limit: spec.scaling.maxReplicas is {most}, choose yours")
    draft.autoscale(fewest, whole(most), "spec.minReplicas", "it scaled by requests in flight")
    if draft.get("scaling") and (delay := fields.take("spec.scaleDownDelaySeconds")) is not None:
        draft.put("scaling.scaleDown.stabilizationWindowSeconds", whole(delay), "spec.scaleDownDelaySeconds")


MODEL_REASONS = reasons("Model")
