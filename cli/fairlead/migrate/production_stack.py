"""Helm values of vLLM's production-stack. Each entry of modelSpec becomes the pod that the chart makes of it."""

from collections.abc import Iterator, Mapping
from typing import Any

from fairlead.migrate.command_line import read_arguments
from fairlead.migrate.context import SEVERAL_PODS, Context, OtherWorkload
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, quantity, reasons, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import keep_volume, read_container, read_env, read_pod
from fairlead_operator.api.resources import NVIDIA
from fairlead_router.config import check_session_header

ENGINES = "servingEngineSpec"
MODEL = f"{ENGINES}.modelSpec"
_FLAGS = {
    "modelURL": "model",
    "modelRevision": "revision",
    "enableLoRA": "enable-lora",
    "enableTool": "enable-auto-tool-choice",
    "toolCallParser": "tool-call-parser",
    "vllmConfig.enableChunkedPrefill": "enable-chunked-prefill",
    "vllmConfig.enablePrefixCaching": "enable-prefix-caching",
    "vllmConfig.maxModelLen": "max-model-len",
    "vllmConfig.dtype": "dtype",
    "vllmConfig.tensorParallelSize": "tensor-parallel-size",
    "vllmConfig.maxNumSeqs": "max-num-seqs",
    "vllmConfig.gpuMemoryUtilization": "gpu-memory-utilization",
    "vllmConfig.maxLoras": "max-loras",
    "vllmConfig.runner": "runner",
    "vllmConfig.convert": "convert",
}
_OF_PODS = ("affinity", "priorityClassName", "env", "resources")
_POLICIES = {"roundrobin": "RoundRobin", "session": "Session"}


def split_stack(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield values for each entry of modelSpec, with the entry in place of the list; other objects as they are."""
    found = Fields(values).look(MODEL)
    if not isinstance(found, list) or not found:
        yield values
        return
    yield from ({**values, ENGINES: {**values[ENGINES], "modelSpec": entry or {}}} for entry in found)


def convert_stack(fields: Fields, context: Context) -> Draft:
    """Return the draft of an entry of modelSpec. Raises OtherWorkload and NotMigratable."""
    if not (found := fields.look(MODEL)):
        raise NotMigratable(f"{MODEL} has {'an empty entry: fill or remove it' if found == {} else 'no model: write one'}")
    engines, entry = fields.part(ENGINES), fields.part(MODEL)
    if False in (entry.take("enabled"), engines.take("enableEngine")):
        raise OtherWorkload("it is not enabled")
    if entry.look("raySpec.enabled"):
        raise NotMigratable(f"{MODEL}.raySpec: {SEVERAL_PODS}")
    draft = Draft()
    draft.identify(engines, "modelSpec")
    models = [one for one in map(Fields, context.objects) if one.look(f"{MODEL}.enabled") is not False]
    others = [name for one in models if (name := one.look(f"{MODEL}.name")) not in (None, entry.look("name"))]
    if others:
        draft.note(MODEL, "one URL serves all models of the chart: for one, name the other services in spec.exposure.otherServices", others)
    for path, name in _FLAGS.items():
        if isinstance(value := entry.take(path), bool):
            if value or "." in path:  # the chart says no to what vLLM does by default
                draft.flags.append((name if value else f"no-{name}", "", [], entry.at(path)))
        elif value not in (None, ""):
            draft.flags.append((name, "", [quantity(value)], entry.at(path)))
    _read_pod(draft, engines, entry)
    read_arguments(draft, entry.words("vllmConfig.extraArgs"), entry.at("vllmConfig.extraArgs"))
    if (replicas := entry.take("replicaCount")) is not None:
        draft.put("replicas", whole(replicas), entry.at("replicaCount"))
    if entry.take("keda.enabled"):
        fewest, most = whole(entry.take("keda.minReplicaCount", 0)), whole(entry.take("keda.maxReplicaCount", 100))
        draft.autoscale(fewest, most, entry.at("keda"), "KEDA scaled by its triggers")
    for adapter in fields.items("loraAdapters"):
        if adapter.take("enabled") is False or adapter.look("baseModel") in others:
            adapter.mark()
        elif adapter.look("baseModel") == entry.look("name") and adapter.look("adapterSource.type") == "huggingface":
            found = [adapter.need(f"adapterSource.{name}") for name in ("adapterName", "repository")]
            draft.adapters.append((found[0], found[1], adapter.path))
            for name in ("name", "baseModel", "adapterSource.type"):
                adapter.take(name)
    _read_router(draft, fields.part("routerSpec"))
    finish(draft)
    return draft


def _read_pod(draft: Draft, engines: Fields, entry: Fields) -> None:
    """Read the pod that the chart makes."""
    if isinstance(entry.look("hf_token"), Mapping) and (secret := entry.take("hf_token.secretName")):
        draft.put("model.secretRef", {"name": secret, "key": entry.take("hf_token.secretKey", "token")}, entry.at("hf_token"))
    settings = [{"name": name, "value": value} for name, value in engines.take("configs", {}).items()]
    read_env(draft, [*(Fields(one, engines.at("configs")) for one in settings), *engines.items("env")])
    volumes, mounts = entry.look("extraVolumes", []), entry.take("extraVolumeMounts", [])
    for volume in entry.items("extraVolumes"):
        if any(mount["name"] == volume.look("name") for mount in mounts):
            volume.mark()
    model, claim, storage = str(entry.look("modelURL")), entry.take("pvcExistingClaimName"), entry.look("pvcStorage")
    if model.startswith("/data/shared-pvc-storage/"):
        raise NotMigratable(f"{entry.at('modelURL')} is on sharedPvcStorage: write it as pvc://RELEASE-shared-pvc-storage-claim/PATH")
    if claim or isinstance(storage, Mapping):
        entry.take("pvcStorage")
        volumes = [{"name": "chart-storage", **({"persistentVolumeClaim": {"claimName": claim}} if claim else storage)}, *volumes]
        mounts = [{"name": "chart-storage", "mountPath": "/data"}, *mounts]
        draft.cache_paths.append("/data/hub")
    elif storage and model.startswith("/data/"):
        made = f"RELEASE-{entry.look('name')}-storage-claim"
        raise NotMigratable(f"{entry.at('modelURL')} is on the claim that the chart makes, {made}: name it in pvcExistingClaimName")
    shared, own, runtime_class = engines.take("tolerations", []), entry.take("tolerations", []), engines.take("runtimeClassName")
    pod = {
        "image": ":".join(quantity(part) for name in ("repository", "tag") if (part := entry.take(name))),
        "tolerations": own if own and entry.take("tolerationsPolicy") == "override" else [*shared, *own],
        "runtimeClassName": entry.data.get("runtimeClassName", runtime_class),
        "schedulerName": engines.take("schedulerName"),
        "imagePullSecrets": [{"name": name}] if (name := entry.take("imagePullSecret")) else [],
        "envFrom": [{"secretRef": {"name": name}}] if (name := entry.take("envFromSecret.name")) else [],
        "volumes": volumes,
        "volumeMounts": mounts,
    }
    if not entry.look("affinity") and not entry.look("nodeName") and (terms := entry.take("nodeSelectorTerms")):
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    if not entry.look("resources"):
        _read_resources(draft, entry)
    rendered = Fields({**{name: entry.look(name) for name in _OF_PODS}, **pod}, entry.path, entry.used)
    read_pod(draft, rendered, "")
    read_container(draft, rendered, rendered)
    if size := entry.take("shmSize"):
        keep_volume(draft, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(size)}})
    draft.label_pods(entry, "podLabels", "podAnnotations")


def _read_resources(draft: Draft, entry: Fields) -> None:
    for path, target in (("requestCPU", "cpu"), ("requestMemory", "memory"), ("limitMemory", "memory")):
        if (value := entry.take(path)) is not None:
            draft.put(f"resources.{target}", quantity(value), entry.at(path))
    number, kind = float(entry.take("requestGPU", 0)), entry.take("requestGPUType")
    if number % 1:
        raise NotMigratable(f"{entry.at('requestGPU')} {number}: workers have whole GPUs, or MIG slices (requestGPUType): write how many")
    if number:
        draft.gpus, draft.origins["resources.gpus"] = int(number), entry.at("requestGPU")
        if kind and kind != NVIDIA:
            draft.put("resources.gpuResource", kind, entry.at("requestGPUType"))


def _read_router(draft: Draft, router: Fields) -> None:
    if router.look("enableRouter") is True:
        router.take("enableRouter")
    if (replicas := router.take("replicaCount")) is not None:
        draft.put("routing.replicas", whole(replicas), router.at("replicaCount"))
    if logic := router.take("routingLogic"):
        draft.put("routing.policy", _POLICIES.get(str(logic).lower(), "PrefixAware"), router.at("routingLogic"))
        if logic not in (*_POLICIES, "prefixaware", "kvaware"):
            draft.note(router.at("routingLogic"), "PrefixAware, for workers that do both prefill and decode, replaces it", logic)
        if str(logic).lower() == "session" and (header := router.take("sessionKey")) is not None:
            try:
                draft.put("routing.args", [f"--session-header={check_session_header(str(header))}"], router.at("sessionKey"))
            except ValueError:
                draft.note(router.at("sessionKey"), "the router takes no session from this header: it reads x-session-id", header)
    draft.put("routing.metricsNames", "VLLM", "routerSpec")  # so that dashboards of production-stack keep their metrics


STACK_REASONS = reasons("pod", ENGINES, MODEL) | reasons("stack")
