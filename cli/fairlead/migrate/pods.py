"""PodSpecs and the container that runs vLLM, in the forms that all sources share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, gpu_count, quantity

PRODUCT_LABEL = "nvidia.com/gpu.product"
_GPU = re.compile(r"^[^/]+/(gpu(\.shared)?|mig-.+|tpu|gaudi|i915|xe|ATOM|npu|neuron(core|device)?|Ascend\w+|mlu|dcu)$", re.IGNORECASE)
_KEPT = (
    "tolerations",
    "affinity",
    "topologySpreadConstraints",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "hostAliases",
    "dnsPolicy",
    "dnsConfig",
)
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
CACHES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE")
_PROBE = "the operator sets the probes of workers: nothing to do"
_USER = "workers run as user 65532 with a read-only root file system; set what the image needs in spec.podTemplate"
_HOST = "workers use no namespace of the host: add it to spec.podTemplate if NCCL needs it"
_DROPPED: dict[str, str] = {
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "startupProbe": _PROBE,
    "ports": "the operator sets the ports: clients call port 80 of the service",
    "imagePullPolicy": "the operator sets it for all pods: nothing to do",
    "lifecycle": "a worker drains for spec.rollout.drainTimeoutSeconds: nothing to do",
    "terminationGracePeriodSeconds": "set spec.rollout.drainTimeoutSeconds to the longest response",
    "securityContext": _USER,
    "hostNetwork": _HOST,
    "hostIPC": _HOST,
    "hostPID": _HOST,
    "nodeName": "select the node by its label kubernetes.io/hostname in spec.podTemplate.spec.nodeSelector",
    "initContainers": "the engine would start before them: put what they prepare on a claim (a model: pvc://), or into the image",
    "serviceAccountName": "workers have a ServiceAccount with the name of the service: give that one the rights (for example to a bucket)",
    "workingDir": "vLLM needs no working directory: write absolute paths",
    "resources.limits.cpu": "workers have a CPU request, and no limit: nothing to do",
    "resources.requests.memory": "spec.resources.memory is the request and the limit: nothing to do",
    "volumes": "no container that was carried over mounts it: nothing to do",
    "volumeMounts": "the operator mounts a volume at this path: nothing to do",
    "name": "",
    "restartPolicy": "",
    "enableServiceLinks": "",
    "automountServiceAccountToken": "",
    "tty": "",
    "stdin": "",
    "terminationMessagePath": "",
    "terminationMessagePolicy": "",
}
_DROPPED["serviceAccount"] = _DROPPED["serviceAccountName"]


def reasons_of_pod(*paths: str) -> dict[str, str]:
    """Return the reasons for the fields of the PodSpecs and containers at these paths. An empty reason: the field says nothing."""
    return {f"{path}.{name}": reason for path in paths for name, reason in _DROPPED.items()}


def read_pod(draft: Draft, pod: Fields, engine: str) -> None:
    """Read a PodSpec. `engine`: path of the container that runs vLLM, whose volumes `read_container` needs."""
    for name in _KEPT:
        if value := pod.take(name):
            draft.pod[name] = value
            if "labelSelector" in str(value):
                draft.note(pod.at(name), "its labelSelector was carried over: it may select labels that only the old pods have")
    read_node_selector(draft, pod)
    if secrets := pod.take("imagePullSecrets"):
        draft.put("imagePullSecrets", secrets, pod.at("imagePullSecrets"))
    for volume in pod.items("volumes"):
        draft.volumes[str(volume.look("name"))] = dict(volume.data)
    for claim in pod.items("resourceClaims"):
        draft.claims[str(claim.look("name"))] = claim
    for other in pod.items("containers"):
        if other.path != engine:
            pod.used[other.path] = True
            name = str(other.look("name"))
            renamed = f"own-{name}" if name in ("agent", "engine", "worker") else name
            draft.pod.setdefault("containers", []).append({**other.data, "name": renamed})
            draft.note(other.path, "runs beside the engine as before: check whether you need it", name)
            for mount in other.items("volumeMounts"):
                _keep_volume(draft, pod, str(mount.look("name")))


def read_node_selector(draft: Draft, pod: Fields) -> None:
    selector = dict(pod.take("nodeSelector", {}))
    if product := selector.pop(PRODUCT_LABEL, None):
        draft.put("resources.gpuType", product, pod.at(f"nodeSelector.{PRODUCT_LABEL}"))
    if selector:
        draft.pod["nodeSelector"] = selector


def _keep_volume(draft: Draft, pod: Fields, name: str) -> None:
    if name in draft.volumes and draft.volumes[name] not in draft.pod.setdefault("volumes", []):
        draft.pod["volumes"].append(draft.volumes[name])
    pod.used.update((volume.path, True) for volume in pod.items("volumes") if volume.look("name") == name)


def read_container(draft: Draft, container: Fields, pod: Fields) -> None:
    """Read the container that runs vLLM, but its command."""
    if image := container.take("image"):
        draft.put("engine.image", image, container.at("image"))
    if sources := container.take("envFrom"):
        draft.container["envFrom"] = sources
        draft.note(container.at("envFrom"), "if it holds the hub's token, name that Secret in spec.model.secretRef too: the agent needs it")
    read_env(draft, container.items("env"))
    read_resources(draft, container.part("resources"))
    for mount in container.items("volumeMounts"):
        _read_mount(draft, mount, pod)


def read_env(draft: Draft, variables: Sequence[Fields]) -> None:
    for variable in variables:
        name, value, source = str(variable.take("name", "")), variable.data.get("value"), variable.take("valueFrom")
        variable.take("value")
        where = f"{variable.path} {name}"
        if name == "VLLM_API_KEY":
            draft.note(
                where, "routers check keys, one for each tenant: make them with `fairlead keys new`, and set spec.access.keysSecretRef"
            )
        elif name in HUB_TOKENS and isinstance(source, Mapping) and set(source.get("secretKeyRef") or {}) == {"name", "key"}:
            draft.put("model.secretRef", dict(source["secretKeyRef"]), where)
        elif name == "VLLM_USE_V1" and str(value) == "0":
            draft.note(where, "the agent needs vLLM's V1 engine", value)
        elif name in CACHES:
            draft.cache_paths.append(str(value))
            draft.note(where, "the operator sets HF_HOME; spec.model.cache is the volume: nothing to do", value)
        else:
            if name in HUB_TOKENS and value:
                draft.note(where, "the token is in the manifest: put it into a Secret and name it in spec.model.secretRef")
            kept = {"valueFrom": source} if source is not None else {"value": "" if value is None else _text(value)}
            draft.env[name] = {"name": name, **kept}
            draft.origins["engine.env"] = re.sub(r"\[\d+\]$", "", variable.path)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def read_resources(draft: Draft, resources: Fields) -> None:
    """Read requests and limits."""
    limits, requests = resources.part("limits"), resources.part("requests")
    for name in dict.fromkeys([*requests.keys(), *limits.keys()]):
        first, second = (requests, limits) if name == "cpu" else (limits, requests)
        side = first if first.data.get(name) is not None else second
        value = side.key(name)
        source = side.at(name)
        if side is first and second.data.get(name) in (None, value):
            second.key(name)
        if name in ("cpu", "memory"):
            draft.put(f"resources.{name}", quantity(value), source)
        elif _GPU.match(name) and draft.gpus is None:
            second.key(name)
            draft.gpus = gpu_count(value, source)
            draft.origins["resources.gpus"] = source
            if name != "nvidia.com/gpu" and draft.gpus:
                draft.put("resources.gpuResource", name, source)
        elif value is not None:
            second.key(name)
            for kind, part in (("limits", limits), ("requests", requests)):
                if name in part.data:
                    draft.container.setdefault("resources", {}).setdefault(kind, {})[name] = quantity(part.data[name])
    for claim in resources.items("claims"):
        _read_claim(draft, claim)


def _read_claim(draft: Draft, claim: Fields) -> None:
    name = str(claim.take("name"))
    template = draft.claims[name].look("resourceClaimTemplateName") if name in draft.claims else None
    if template is None:
        raise NotMigratable(f"{claim.path}: workers need a resourceClaimTemplateName: one claim serves one pod only")
    draft.claims[name].used[draft.claims[name].path] = True
    claims = [*(draft.get("resources.resourceClaims") or []), {"name": name, "resourceClaimTemplateName": template}]
    draft.spec.setdefault("resources", {})["resourceClaims"] = claims
    draft.origins["resources.resourceClaims"] = claim.path


def _read_mount(draft: Draft, mount: Fields, pod: Fields) -> None:
    """Keep a volume of the engine's container by its path: `fairlead.migrate.finish` finds the model and the cache there."""
    path, name = str(mount.look("mountPath", "")).rstrip("/"), str(mount.look("name"))
    if path == "/dev/shm":
        pod.used.update((volume.path, True) for volume in pod.items("volumes") if volume.look("name") == name)
        mount.used[mount.path] = True
        if size := (draft.volumes.get(name, {}).get("emptyDir") or {}).get("sizeLimit"):
            set_shared_memory(draft, size)
        return
    volume = draft.volumes.get(name)
    if volume is None:
        draft.note(mount.path, f"the pod has no volume {name}: mount a claim by spec.model.cache or a pvc:// model", dict(mount.data))
    else:
        draft.mounts[path] = (volume, str(mount.look("subPath", "") or ""))
        draft.mount_specs[path] = dict(mount.data)
        pod.used.update((one.path, True) for one in pod.items("volumes") if one.look("name") == name)
    mount.used[mount.path] = True


def set_shared_memory(draft: Draft, size: Any) -> None:
    """Give /dev/shm of the worker this size."""
    draft.pod.setdefault("volumes", []).append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(size)}})
