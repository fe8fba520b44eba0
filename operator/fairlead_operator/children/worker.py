"""The workers: a Deployment or LeaderWorkerSet of model replicas, a headless Service for discovery, and a PodDisruptionBudget."""

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fairlead_common.scheduling_policy import DEFINITIONS
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.fields import quantity
from fairlead_operator.children import canary, engine_pod, groups, pods, redis, security
from fairlead_operator.children.model_source import ModelSource, model_source
from fairlead_operator.children.placement import device_resources, placement
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Object
from fairlead_operator.revisions import pin, worker_revision
from fairlead_operator.rollout.images import count_gpus, worker_image
from fairlead_operator.rollout.sides import STABLE_ONLY, Sides
from fairlead_operator.rollout.step import Step
from fairlead_operator.settings import Settings

SPECULATIVE_METHODS = {"NGram": "ngram", "Draft": "draft_model"}
"""Value of `method` in `--speculative-config` for `spec.engine.speculativeDecoding.method`."""
DEFAULT_MAX_LORAS = 8  # the worker's default of --max-loras
MIN_REQUESTS = {"cpu": "100m", "memory": "512Mi"}
"""Of a worker without CPU and memory in its manifest. Without requests its pod is BestEffort, as GPUs do not count: evicted first."""
MIN_READY_SECONDS = 10
"""Cluster DNS caches addresses of workers for 5 seconds, and without an index routers discover workers only through DNS."""
STARTUP_PERIOD, STARTUP_FAILURES = 5, 60  # seconds, probes: until the process first answers, with a cold disk
# A load has no fixed limit (kubeai#179): /health is 200 while it makes progress. The worker ends a stalled load and logs the step.


def objects(
    service: InferenceService,
    settings: Settings,
    revisions: Iterable[Mapping[str, Any]] = (),
    step: Step | None = None,
    sides: Sides = STABLE_ONLY,
    commit: str = "",
) -> list[Object]:
    """Return the objects of the workers.

    `revisions`: the observed ControllerRevisions; a template is stored in one before it is used. `step`: of the rollout; None: the first.
    `commit`: of the model, for a template that is rendered now.
    """
    step, seen = step or Step(worker_revision(service)), list(revisions)
    tried = worker_revision(service) if sides.stable else step.revision
    pinned = pin(service, names.WORKER, tried, _template(service, settings, commit), seen, step.in_use | {sides.stable}, sides.failure)
    stable = canary.stable_template(service, sides, seen)
    return [
        *(_account(service), _headless_service(service), *groups.secret(service), *pinned.revisions),
        *canary.objects(service, tried, pinned.template, sides, MIN_READY_SECONDS),
        *(_deployment(service, stable or pinned.template, step), _budget(service)),
    ]


def _account(service: InferenceService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.metadata(service, service.name, names.WORKER),
        "automountServiceAccountToken": False,  # workers and routers do not use the API server
    }


def _headless_service(service: InferenceService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(service, names.workers_service(service), names.WORKER),
        "spec": {
            "clusterIP": "None",
            "selector": names.selector(service, names.WORKER),
            # Routers connect to addresses of pods. For HTTP, Istio's sidecars route by the Host header, which is no name of a service then,
            # and send plain text, which STRICT refuses (istio#34679). For TCP they have a listener with mTLS for each pod.
            "ports": [{"name": "http", "port": names.WORKER_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "tcp"}],
        },
    }


def _budget(service: InferenceService) -> Object:
    wanted = service.spec.pod_disruption_budget
    bound: Object = {"maxUnavailable": wanted.max_unavailable}
    if wanted.min_available is not None:
        bound = {"minAvailable": groups.count_pods(service, wanted.min_available)}
    return groups.disruption_budget(service, pods.disruption_budget(service, names.WORKER, bound))


def _deployment(service: InferenceService, template: Object, step: Step) -> Object:
    if groups.is_grouped(service):
        return groups.leader_worker_set(service, template, step)
    return pods.deployment(
        service,
        names.WORKER,
        replicas=service.spec.desired_replicas,
        template=template,
        strategy=step.strategy,
        min_ready_seconds=MIN_READY_SECONDS,
        paused=step.paused,
    )


def _template(service: InferenceService, settings: Settings, commit: str) -> Object:
    source = model_source(service.spec, commit)
    volumes: list[Object] = [
        {"name": "tmp", "emptyDir": {}},
        # torch and NCCL use /dev/shm; its default size is 64 MiB.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
        *source.volumes,
        *redis.volumes(service, settings, names.WORKER),
    ]
    if service.spec.engine.runtime == "Fairlead":
        spec = pods.pod_spec(service, settings, names.WORKER, _container(service, settings, source), volumes)
        template: Object = {"spec": spec}
    else:
        agent = engine_pod.agent(service, settings, source, _identity(service, settings))
        engine = engine_pod.engine(service, settings, source, _resources(service, settings))
        spec = pods.pod_spec(service, settings, names.WORKER, agent, [*volumes, {"name": engine_pod.AGENT_TMP, "emptyDir": {}}])
        template = {"metadata": {"annotations": engine_pod.ANNOTATIONS}, "spec": {**spec, "initContainers": [engine]}}
    template["spec"] |= placement(service, count_gpus(service, settings))
    return pods.finish(service, names.WORKER, worker_revision(service), template, service.spec.pod_template)


def _container(service: InferenceService, settings: Settings, source: ModelSource) -> Object:
    return {
        "name": "worker",
        "image": worker_image(service, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["fairlead-worker"],
        "args": arguments(service, source),
        "env": engine_pod.override(
            [
                *_identity(service, settings, _warmup(service, settings)),
                *source.env,
                *groups.environment(service, worker_revision(service)),
            ],
            engine_pod.engine_environment(service),
        ),
        "ports": [
            {"name": "http", "containerPort": names.WORKER_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.WORKER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": _resources(service, settings),
        "securityContext": security.container_context(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *source.mounts,
            *redis.mounts(settings),
        ],
        "startupProbe": pods.probe("/health", period=STARTUP_PERIOD, failures=STARTUP_FAILURES),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "livenessProbe": pods.liveness(failures=6),
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",  # the last log lines reach the status of the pod
    }


def _identity(service: InferenceService, settings: Settings, more: Mapping[str, object] = MappingProxyType({})) -> list[Object]:
    """Return the settings that have no flag. The kubelet expands `$(POD_IP)`, which stands before them. `more`: further settings."""
    variables: dict[str, object] = {
        "FAIRLEAD_ADVERTISE": f"$(POD_IP):{names.WORKER_PORT}",
        "FAIRLEAD_ADMIN_PORT": names.WORKER_ADMIN_PORT,
        "FAIRLEAD_INDEX_NAMESPACE": names.index_namespace(service),
        **redis.variables(service, settings),
        **more,
    }
    return [
        pods.downward("FAIRLEAD_POD_NAME", "metadata.name"),
        pods.downward("POD_IP", "status.podIP"),
        *({"name": name, "value": str(value)} for name, value in variables.items()),
        *pods.tracing(settings),
        {"name": "HOME", "value": "/tmp"},  # the root file system is read-only; kernels are compiled into ~/.cache
    ]


def _warmup(service: InferenceService, settings: Settings) -> dict[str, object]:
    """Return the settings of prefix warm-up."""
    engine = service.spec.engine
    if not engine.warmup_tokens:
        return {}
    workers = f"{names.workers_service(service)}.{service.namespace}.svc.{settings.cluster_domain}"
    return {
        "FAIRLEAD_WARMUP_TOKENS": engine.warmup_tokens,
        "FAIRLEAD_PEERS": f"dns://{workers}:{names.WORKER_PORT}",
    }


def arguments(service: InferenceService, source: ModelSource) -> list[str]:
    """Return the command line of a worker. Arguments of the user come last, because the last value of a flag is used."""
    engine, cache = service.spec.engine, service.spec.engine.kv_cache
    flags: dict[str, object] = {
        "model": source.uri,
        "served-model-name": service.served_model_name,
        "host": "0.0.0.0",
        "port": names.WORKER_PORT,
        "page-size": cache.page_tokens,
        "block-tokens": cache.block_tokens,
        "max-model-len": engine.max_model_len or 0,  # 0: the limit of the model
        "max-num-seqs": engine.max_num_seqs,
        "chunked-prefill-size": engine.chunked_prefill_size,
        "max-prefill-tokens": engine.max_prefill_tokens,
        "dtype": engine.dtype.lower(),
        "threads": engine.threads or 0,  # 0: from the CPU quota
        "drain-timeout": service.spec.rollout.drain_timeout_seconds,
    }
    if engine.scheduling_policy is not None:
        flags["scheduling-policy"] = DEFINITIONS[engine.scheduling_policy].fairlead
    if cache.pages is not None:
        flags["kv-pages"] = cache.pages
    if cache.size is not None:
        flags["kv-cache-memory-bytes"] = round(quantity(cache.size))
    if cache.dtype != "Auto":
        flags["kv-cache-dtype"] = cache.dtype.lower()
    if cache.host_size is not None:
        flags["host-kv-cache-bytes"] = round(quantity(cache.host_size))
    if engine.tensor_parallel > 1:
        flags["tensor-parallel-size"] = engine.tensor_parallel
    if engine.nodes > 1:
        flags["nnodes"] = engine.nodes
    if engine.itl_target_milliseconds is not None:
        flags["itl-target-ms"] = engine.itl_target_milliseconds
    if engine.quantization != "None":
        flags["quantization"] = engine.quantization.lower()
    if engine.max_waiting_requests != 1024:
        flags["max-waiting-requests"] = engine.max_waiting_requests
    if (speculation := engine.speculative_decoding) is not None:
        config = {"method": SPECULATIVE_METHODS[speculation.method]}
        flags["speculative-config"] = json.dumps(config | ({"model": source.draft} if source.draft else {}))
    loras = [f"--lora-modules={name}={uri}" for name, uri in source.adapters.items()]
    if len(loras) > DEFAULT_MAX_LORAS:
        flags["max-loras"] = len(loras)
    return [f"--{flag}={value}" for flag, value in flags.items() if value != ""] + loras + list(engine.args)


def _sets_resources(service: InferenceService) -> bool:
    """Return whether `spec.podTemplate` gives the engine's container CPU or memory."""
    spec = service.spec.pod_template.spec if service.spec.pod_template is not None else {}
    given = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    named = [one.get("resources") or {} for one in given if one.get("name") in (names.WORKER, names.ENGINE)]
    return any(name in (one.get(kind) or {}) for one in named for kind in ("requests", "limits") for name in MIN_REQUESTS)


def _resources(service: InferenceService, settings: Settings) -> Object:
    resources = service.spec.resources
    devices = device_resources(service, count_gpus(service, settings))
    own: Object = {"requests": {}, "limits": {}}
    if resources.cpu is not None:
        own["requests"]["cpu"] = resources.cpu
    if resources.memory is not None:
        own["requests"]["memory"] = own["limits"]["memory"] = resources.memory
    if resources.cpu is None and resources.memory is None and not _sets_resources(service):
        own["requests"] |= MIN_REQUESTS
    return {key: value for key, value in merge(own, devices).items() if value}
