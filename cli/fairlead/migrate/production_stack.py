"""Helm values of vLLM's production-stack: an InferenceService for each entry of `modelSpec`."""

from collections.abc import Mapping
from typing import Any

from fairlead.migrate.command_line import read_arguments
from fairlead.migrate.draft import Draft
from fairlead.migrate.fields import Fields, NotMigratable, gpu_count, quantity, whole
from fairlead.migrate.finish import finish
from fairlead.migrate.pods import read_container, read_env, read_pod, read_resources, reasons_of_pod, set_shared_memory
from fairlead.migrate.sources import Context, Source, pod_metadata, read_gateway
from fairlead.migrate.tables import Field, apply, flag, node_terms, switches, to_pod

_POLICIES = {
    "roundrobin": "RoundRobin",
    "session": "Session",
    "prefixaware": "PrefixAware",
    "kvaware": "PrefixAware",
    "disaggregated_prefill": "PrefixAware",
    "disaggregated_prefill_orchestrated": "PrefixAware",
}
_SECRET = "put it into a Secret (kubectl create secret generic hub --from-literal=token=…) and name that in spec.model.secretRef"


def _gpu_type(draft: Draft, value: Any, source: str) -> None:
    """In the chart this is the name of the extended resource."""
    if value != "nvidia.com/gpu":
        draft.put("resources.gpuResource" if "/" in str(value) else "resources.gpuType", value, source)


def _gpus(draft: Draft, value: Any, source: str) -> None:
    draft.gpus, draft.origins["resources.gpus"] = gpu_count(value, source), source


def _model(draft: Draft, value: Any, source: str) -> None:
    draft.model, draft.model_source = str(value), source


MODEL_SPEC = (
    Field("modelURL", _model),
    Field("modelRevision", "model.revision", str),
    Field("replicaCount", "replicas", whole),
    Field("requestCPU", "resources.cpu", quantity),
    Field("requestMemory", "resources.memory", quantity),
    Field("limitMemory", "resources.memory", quantity),
    Field("requestGPU", _gpus),
    Field("requestGPUType", _gpu_type),
    Field("enableLoRA", switches("enable-lora")),
    Field("enableTool", switches("enable-auto-tool-choice")),
    Field("toolCallParser", flag("tool-call-parser")),
    Field("vllmConfig.enablePrefixCaching", switches("enable-prefix-caching", "no-enable-prefix-caching")),
    Field("vllmConfig.enableChunkedPrefill", switches("enable-chunked-prefill", "no-enable-chunked-prefill")),
    Field("vllmConfig.maxModelLen", flag("max-model-len")),
    Field("vllmConfig.dtype", flag("dtype")),
    Field("vllmConfig.tensorParallelSize", flag("tensor-parallel-size")),
    Field("vllmConfig.pipelineParallelSize", flag("pipeline-parallel-size")),
    Field("vllmConfig.maxNumSeqs", flag("max-num-seqs")),
    Field("vllmConfig.gpuMemoryUtilization", flag("gpu-memory-utilization")),
    Field("vllmConfig.maxLoras", flag("max-loras")),
    Field("vllmConfig.runner", flag("runner")),
    Field("vllmConfig.convert", flag("convert")),
    Field("nodeSelectorTerms", node_terms),
    Field("runtimeClassName", to_pod("runtimeClassName")),
    Field("priorityClassName", to_pod("priorityClassName")),
    Field("shmSize", lambda draft, value, source: set_shared_memory(draft, value)),
    Field("imagePullSecret", "imagePullSecrets", lambda name: [{"name": name}]),
    Field("pvcExistingClaimName", "model.cache.persistentVolumeClaim.claimName", str),
    Field("envFromSecret.name", lambda draft, value, source: draft.container.update(envFrom=[{"secretRef": {"name": value}}])),
)
"""Of an entry of modelSpec. Of two rows with one target the last wins."""


def _router_pod(name: str) -> Any:
    def put(draft: Draft, value: Any, source: str) -> None:
        draft.spec.setdefault("router", {}).setdefault("podTemplate", {}).setdefault("spec", {})[name] = value

    return put


ROUTER_SPEC = (
    Field("replicaCount", "routing.replicas", whole),
    Field("routingLogic", "routing.policy", lambda value: _POLICIES[str(value).lower()]),
    Field("resources", _router_pod("containers"), lambda value: [{"name": "router", "resources": value}]),
    Field("nodeSelector", _router_pod("nodeSelector")),
    Field("tolerations", _router_pod("tolerations")),
    Field("affinity", _router_pod("affinity")),
    Field("priorityClassName", _router_pod("priorityClassName")),
    Field("imagePullSecrets", "imagePullSecrets"),
)
_CLAIM = "create a PersistentVolumeClaim and name it in spec.model.cache.persistentVolumeClaim"
_CLIENTS = "clients call the Service of the InferenceService: write an Ingress to it, or set spec.exposure.gateway"
_LMCACHE = "add vLLM's --kv-transfer-config and LMCache's variables to spec.engine; the prefix index does not follow LMCache"
_CONTROLLER = "the operator of Fairlead needs no such part: nothing to do"
_CHAT_TEMPLATE = "put it into a ConfigMap, mount that with spec.podTemplate, and add --chat-template to spec.engine.args"
_KEYS = "make keys with `fairlead keys new`, and name their Secret in spec.access.keysSecretRef"
_ROUTER_OWN = "the operator sets it for the routers: nothing to do"
_STACK_REASONS = {
    **reasons_of_pod("servingEngineSpec", "servingEngineSpec.modelSpec"),
    **{f"servingEngineSpec.modelSpec.{name}": _CLAIM for name in ("pvcStorage", "pvcAccessMode", "storageClass", "pvcMatchLabels")},
    **{f"servingEngineSpec.modelSpec.{name}": _CLAIM for name in ("pvcLabels", "pvcAnnotations")},
    "servingEngineSpec.modelSpec.hf_token": _SECRET,
    "servingEngineSpec.modelSpec.limitCPU": "workers have a CPU request, and no limit: nothing to do",
    "servingEngineSpec.modelSpec.lmcacheConfig": _LMCACHE,
    "servingEngineSpec.modelSpec.chatTemplate": _CHAT_TEMPLATE,
    "servingEngineSpec.modelSpec.initContainer": reasons_of_pod("")[".initContainers"],
    "servingEngineSpec.modelSpec.keda": "spec.scaling.target is the only metric: nothing to do",
    "servingEngineSpec.modelSpec.raySpec": "a worker needs no Ray: nothing to do",
    "servingEngineSpec.modelSpec.vllmConfig.v0": "the agent needs vLLM's V1 engine",
    "servingEngineSpec.modelSpec.vllmConfig.v1": "V1 is the only engine: nothing to do",
    "servingEngineSpec.modelSpec.labels": "of the Deployment: nothing to do, or add them to metadata.labels",
    "servingEngineSpec.modelSpec.annotations": "of the Deployment: nothing to do, or add them to metadata.annotations",
    "servingEngineSpec.vllmApiKey": _KEYS,
    "servingEngineSpec.labels": "of all pods: add them to spec.podTemplate.metadata.labels",
    "servingEngineSpec.containerPort": "the operator sets the ports: clients call port 80 of the service",
    "servingEngineSpec.servicePort": "the operator sets the ports: clients call port 80 of the service",
    "servingEngineSpec.strategy": "set spec.rollout",
    "servingEngineSpec.sidecar": "adapters are in spec.model.adapters: no sidecar is needed",
    "servingEngineSpec.containerSecurityContext": reasons_of_pod("")[".securityContext"],
    "servingEngineSpec.enableEngine": "",
    "routerSpec.enableRouter": "each InferenceService has routers: nothing to do",
    "routerSpec.sessionKey": "routers read the session from header X-Session-Id: clients send that one",
    "routerSpec.ingress": _CLIENTS,
    "routerSpec.route": _CLIENTS,
    "routerSpec.serviceType": _CLIENTS,
    "routerSpec.nodePort": _CLIENTS,
    "routerSpec.extraArgs": "flags of another router: see spec.routing, spec.slo and the flags of fairlead-router",
    "routerSpec.vllmApiKey": _KEYS,
    "routerSpec.staticBackends": "only InferenceServices are backends: write one for each",
    "routerSpec.staticModels": "only InferenceServices are backends: write one for each",
    **{f"routerSpec.{name}": _ROUTER_OWN for name in ("repository", "tag", "imagePullPolicy", "containerPort", "servicePort", "strategy")},
    **{f"routerSpec.{name}": _ROUTER_OWN for name in ("serviceDiscovery", "k8sServiceDiscoveryType", "engineScrapeInterval")},
    **{f"routerSpec.{name}": _ROUTER_OWN for name in ("requestStatsWindow", "labels", "livenessProbe", "readinessProbe", "startupProbe")},
    **{f"routerSpec.{name}": _ROUTER_OWN for name in ("securityContext", "containerSecurityContext", "lmcacheConfig", "enablePD")},
    **{f"routerSpec.{name}": _ROUTER_OWN for name in ("pdb", "serviceMonitor", "lmcacheControllerPort", "lmcacheControllerReplyPort")},
    **dict.fromkeys(("kube-prometheus-stack", "grafanaDashboards"), "the chart makes monitors and dashboards: nothing to do"),
    "servingEngineSpec.serviceMonitor": "the chart makes PodMonitors (monitoring.podMonitors): nothing to do",
    "routerSpec.otel": "tracing is configured for all services in the chart (docs/operate/tracing.md)",
    "servingEngineSpec.modelSpec.pdb": "set spec.podDisruptionBudget",
    "servingEngineSpec.modelSpec.chatTemplateConfigMap": _CHAT_TEMPLATE,
    "cacheserverSpec": _LMCACHE,
    "loraController": _CONTROLLER,
    "loraAdapters": "only adapters of the hub are carried over: name the others by spec.model.adapters (pvc://)",
    "sharedPvcStorage": _CLAIM,
    "sharedStorage": _CLAIM,
}


def _convert_stack(fields: Fields, context: Context) -> list[Draft]:
    drafts = []
    for entry in fields.items("servingEngineSpec.modelSpec"):
        if entry.take("enabled") is not False:
            drafts.append(_convert_entry(fields, entry))
    if not drafts:
        raise NotMigratable("servingEngineSpec.modelSpec has no enabled model: nothing to migrate")
    if len(drafts) > 1:
        first, source = drafts[0], "servingEngineSpec.modelSpec"
        for one in drafts[1:]:
            if one.get("model.name") == first.get("model.name"):
                first.note(source, f"{one.name} serves the same model: make them one service with the sum of their replicas, or rename one")
        if others := [one.name for one in drafts[1:] if one.get("model.name") != first.get("model.name")]:
            first.put("exposure.otherServices", others, source)
            first.note(source, f"the URL of {first.name} serves the other models too: {', '.join(others)}")
    return drafts


def _convert_entry(fields: Fields, entry: Fields) -> Draft:
    engines, router, adapters = fields.part("servingEngineSpec"), fields.part("routerSpec"), fields.items("loraAdapters")
    draft = Draft()
    draft.rename(entry.take("name", ""), entry.at("name"))
    repository, tag = entry.take("repository"), entry.take("tag")
    if repository:
        draft.put("engine.image", f"{repository}:{tag}" if tag else repository, entry.at("repository"))
    draft.scope, draft.splits_prefill = entry.path, bool(entry.look("lmcacheConfig.enablePD"))
    if draft.splits_prefill:
        draft.note(
            entry.at("lmcacheConfig.enablePD"), "a worker computes both prefill and decode: keep one of the two, with all replicas", True
        )
    for name in ("runtimeClassName", "schedulerName"):
        if value := engines.take(name):
            draft.pod[name] = value
    if isinstance(entry.look("hf_token"), Mapping):
        secret = {"name": entry.take("hf_token.secretName"), "key": entry.take("hf_token.secretKey", "token")}
        if secret["name"]:
            draft.put("model.secretRef", secret, entry.at("hf_token"))
    apply(MODEL_SPEC, entry, draft)
    if not draft.pod.get("runtimeClassName", "-"):
        del draft.pod["runtimeClassName"]
    shared = (
        engines.take("tolerations", []) if entry.take("tolerationsPolicy", "append") == "append" or not entry.look("tolerations") else []
    )
    if tolerations := [*shared, *entry.take("tolerations", [])]:
        draft.pod["tolerations"] = tolerations
    volumes = {"volumes": entry.take("extraVolumes", []), "affinity": entry.take("affinity")}
    pod = Fields({key: value for key, value in volumes.items() if value}, f"{entry.path}.extraVolumes")
    read_pod(draft, pod, "")
    mounts = Fields({"volumeMounts": entry.take("extraVolumeMounts", [])}, f"{entry.path}.extraVolumeMounts")
    read_env(draft, [*engines.items("env"), *entry.items("env")])
    read_container(draft, mounts, pod)
    if raw := entry.look("resources"):
        draft.gpus, draft.spec["resources"] = None, {}
        read_resources(draft, Fields(raw, entry.at("resources"), entry.used))
    read_arguments(draft, entry.take("vllmConfig.extraArgs", []), entry.at("vllmConfig.extraArgs"))
    pod_metadata(draft, entry, "podLabels", "podAnnotations")
    if entry.take("raySpec.enabled"):
        draft.pods = whole(entry.look("vllmConfig.pipelineParallelSize", 1))
        draft.put("replicas", 1, entry.at("raySpec.enabled"))
    if entry.take("keda.enabled"):
        bounds = (whole(entry.take("keda.minReplicaCount", 1)), whole(entry.take("keda.maxReplicaCount", 3)))
        draft.autoscale(bounds, entry.at("keda"), "KEDA scaled by its triggers")
    for adapter in adapters:
        _read_adapter(draft, adapter, entry)
    apply(ROUTER_SPEC, router, draft)
    if router.take("autoscaling.enabled"):
        draft.put("routing.replicas", max(1, whole(router.take("autoscaling.minReplicas", 1))), router.at("autoscaling.minReplicas"))
        draft.put("router.autoscaling.maxReplicas", whole(router.take("autoscaling.maxReplicas", 3)), router.at("autoscaling.maxReplicas"))
    if router.take("route.main.enabled") and router.look("route.main.parentRefs"):
        apply((Field("route.main.hostnames", "exposure.gateway.hostnames"),), router, draft)
        read_gateway(draft, router, "route.main.parentRefs")
    draft.put("routing.metricsNames", "VLLM", "routerSpec")  # dashboards of production-stack keep their names
    finish(draft)
    return draft


def _read_adapter(draft: Draft, adapter: Fields, entry: Fields) -> None:
    """Read an entry of loraAdapters that belongs to this model."""
    source = adapter.part("adapterSource")
    if adapter.look("baseModel") != entry.look("name") or source.look("type") != "huggingface" or not source.look("repository"):
        return
    draft.adapters.append((str(source.take("adapterName", adapter.look("name"))), str(source.take("repository")), adapter.path))
    adapter.used[adapter.path] = True


SOURCES = (
    Source("production-stack values", lambda body: "kind" not in body and "servingEngineSpec" in body, _convert_stack, _STACK_REASONS),
)
