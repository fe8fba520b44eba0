"""PodSpecs and the container that runs vLLM, in the forms that all sources share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, quantity, show, whole

PRODUCT_LABEL = "nvidia.com/gpu.product"
_GPU = re.compile(r"^[^/]+/(gpu(\.shared)?|mig-.+|tpu|gaudi|i915|xe|ATOM|npu|neuron(core|device)?|Ascend\w+|mlu|dcu)$", re.IGNORECASE)
_KEPT = (
    *("tolerations", "affinity", "topologySpreadConstraints", "priorityClassName", "runtimeClassName", "schedulerName"),
    *("hostAliases", "dnsPolicy", "dnsConfig"),
)
_OPERATORS_NAMES = re.compile(r"agent|engine|worker|tmp|shm|cache|model|draft|agent-tmp|adapter-\d+")
"""Containers and volumes of workers. The source's own get other names."""
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_CACHES = {"HF_HOME": "/hub", "HF_HUB_CACHE": "", "HUGGINGFACE_HUB_CACHE": "", "TRANSFORMERS_CACHE": ""}
_HOMES = {"XDG_CACHE_HOME": "/huggingface/hub", "HOME": "/.cache/huggingface/hub"}
"""Variable → the folder of the hub's cache below its value."""


def read_pod(draft: Draft, pod: Fields, engine: str) -> None:
    """Read a PodSpec. `engine`: path of the container that runs vLLM, whose volumes `read_container` needs."""
    for name in _KEPT:
        if value := pod.take(name):
            draft.pod[name] = value
            if "labelSelector" in str(value):
                draft.note(pod.at(name), "its labelSelector was carried over: it may select labels that only the old pods have")
    selector = dict(pod.take("nodeSelector", {}))
    if product := selector.pop(PRODUCT_LABEL, None):
        draft.put("resources.gpuType", product, pod.at(f"nodeSelector.{PRODUCT_LABEL}"))
    if selector:
        draft.pod["nodeSelector"] = selector
    if secrets := pod.take("imagePullSecrets"):
        draft.put("imagePullSecrets", secrets, pod.at("imagePullSecrets"))
    draft.volumes |= {str(volume.look("name")): _rename(volume) for volume in pod.items("volumes")}
    for kind, when in (("initContainers", "before"), ("containers", "beside")):
        for other in [one for one in pod.items(kind) if one.path != engine]:
            other.mark()
            draft.note(other.path, f"runs {when} the engine as before: check whether you need it", other.look("name"))
            kept, mounts = _rename(other), []
            for mount in other.items("volumeMounts"):
                volume = draft.volumes.get(_mark_volume(pod, mount))
                mounts.append({**mount.data, **({"name": volume["name"]} if volume else {})})
                if volume:
                    keep_volume(draft, volume)
            draft.pod.setdefault(kind, []).append(kept | ({"volumeMounts": mounts} if mounts else {}))


def _rename(fields: Fields) -> dict[str, Any]:
    """Return a container or volume with a name that no other of the worker has."""
    name = str(fields.look("name"))
    return {**fields.data, "name": f"own-{name}" if _OPERATORS_NAMES.fullmatch(name) else name}


def keep_volume(draft: Draft, volume: Mapping[str, Any]) -> None:
    if volume not in draft.pod.setdefault("volumes", []):
        draft.pod["volumes"].append(volume)


def _mark_volume(pod: Fields, mount: Fields) -> str:
    """Mark the volume of a mount as read, and return its name."""
    if volume := pod.find("volumes", lambda one: bool(one.look("name") == mount.look("name"))):
        volume.mark()
    return str(mount.look("name"))


def read_container(draft: Draft, container: Fields, pod: Fields) -> None:
    """Read the container that runs vLLM, but its command. The volumes are kept by path: `fairlead.migrate.finish` finds the model there."""
    if image := container.take("image"):
        draft.put("engine.image", image, container.at("image"))
    if sources := container.take("envFrom"):
        draft.container["envFrom"] = sources
        text = "if it holds the hub's token, name that Secret in spec.model.secretRef too: the agent needs it"
        draft.note(container.at("envFrom"), text)
    read_env(draft, container.items("env"))
    read_resources(draft, container.part("resources"))
    for mount in container.items("volumeMounts"):
        mount.mark()
        path, name = str(mount.look("mountPath", "")).rstrip("/"), _mark_volume(pod, mount)
        volume = draft.volumes.get(name)
        if path == "/dev/shm":
            if size := ((volume or {}).get("emptyDir") or {}).get("sizeLimit"):
                keep_volume(draft, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(size)}})
        elif volume is None:
            draft.note(mount.path, f"the pod has no volume {name}: mount a claim by spec.model.cache or a pvc:// model", dict(mount.data))
        else:
            draft.mounts[path] = (volume, dict(mount.data))


def is_vllm_image(container: Fields) -> bool:
    """Return whether the image's entrypoint is vLLM's server, as that of vllm/vllm-openai. A flag such as `--model` does not say so."""
    image = str(container.look("image")).partition("@")[0].rpartition("/")[2].partition(":")[0]
    return "vllm" in image and not re.search("router|proxy|gateway|exporter|sidecar|bench|client|metrics", image)


def read_env(draft: Draft, variables: Sequence[Fields]) -> None:
    for variable in variables:
        name, source, value = str(variable.take("name", "")), variable.take("valueFrom"), variable.take("value")
        where = f"{variable.path} {name}"
        text = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        draft.variables[name] = text if source is None else None
        if name == "VLLM_API_KEY":
            keys = "make them with `fairlead keys new`, and set spec.access.keysSecretRef"
            draft.note(where, f"routers check keys, one for each tenant: {keys}")
        elif name in HUB_TOKENS and isinstance(source, Mapping) and set(source.get("secretKeyRef") or {}) == {"name", "key"}:
            draft.put("model.secretRef", dict(source["secretKeyRef"]), where)
        elif name == "VLLM_USE_V1" and str(value) == "0":
            draft.note(where, "the agent needs vLLM's V1 engine", value)
        elif name in _CACHES:
            draft.cache_paths.append(f"{str(value).rstrip('/')}{_CACHES[name]}")
            draft.note(where, "the operator sets HF_HOME; spec.model.cache is the volume: nothing to do", value)
        else:
            if name in _HOMES:
                draft.cache_paths.append(f"{text.rstrip('/')}{_HOMES[name]}")
            if name in HUB_TOKENS and value:
                draft.note(where, "the token is in the manifest: put it into a Secret and name it in spec.model.secretRef")
            draft.env[name] = {"name": name} | ({"value": text} if source is None else {"valueFrom": source})
            draft.origins["engine.env"] = re.sub(r"\[\d+\]$", "", variable.path)


def read_resources(draft: Draft, resources: Fields) -> None:
    """Read requests and limits."""
    given = {kind: dict(resources.take(kind, {})) for kind in ("limits", "requests")}
    for name in dict.fromkeys([*given["requests"], *given["limits"]]):
        kinds = sorted(given, reverse=name == "cpu")  # CPU as requested, and all others as limited
        kind = next(one for one in kinds if name in given[one])
        value, source = given[kind][name], resources.at(f"{kind}.{name}")
        if name in ("cpu", "memory"):
            draft.put(f"resources.{name}", quantity(value), source)
            if (other := given[kinds[1]].get(name, value)) != value:
                which = "a CPU request, and no limit" if name == "cpu" else "spec.resources.memory as request and limit"
                draft.note(resources.at(f"{kinds[1]}.{name}"), f"workers have {which}: nothing to do", other)
        elif _GPU.match(name) and (not draft.gpus or name == draft.gpu_resource):
            try:
                draft.gpus, draft.gpu_resource, draft.origins["resources.gpus"] = whole(value), name, source
            except (ValueError, TypeError):
                wrong = f"{show(value)} is no number of whole GPUs: for parts of one name MIG slices as its resource"
                raise NotMigratable(f"{source}: {wrong}") from None
            if name != "nvidia.com/gpu" and draft.gpus:
                draft.put("resources.gpuResource", name, source)
        else:
            if _GPU.match(name):
                draft.note(
                    source, f"in spec.podTemplate beside {draft.gpu_resource}, which alone is spec.resources.gpus: remove one", value
                )
            for one in [one for one in given if name in given[one]]:
                draft.container.setdefault("resources", {}).setdefault(one, {})[name] = quantity(given[one][name])
