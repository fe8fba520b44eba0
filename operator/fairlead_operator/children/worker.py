"""The workers: a Deployment or LeaderWorkerSet of model replicas, a headless Service for discovery, and a PodDisruptionBudget."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_common.scheduling_policy import DEFINITIONS
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.engine import Engine
from fairlead_operator.api.fields import quantity
from fairlead_operator.children import canary, engine_pod, groups, pods, redis
from fairlead_operator.children.model_source import ModelSource, model_source
from fairlead_operator.children.placement import device_resources, placement
from fairlead_operator.kube.kinds import ACCOUNTS, KUBE_SERVICES, make_child
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Object
from fairlead_operator.revisions import pin, worker_revision
from fairlead_operator.rollout.images import count_gpus, worker_image
from fairlead_operator.rollout.step import STABLE_ONLY, Sides, Step
from fairlead_operator.settings import Settings

SPECULATIVE_METHODS = {"NGram": "ngram", "Draft": "draft_model"}
"""Value of `method` in `--speculative-config` for `spec.engine.speculativeDecoding.method`."""
DEFAULT_MAX_LORAS, DEFAULT_MAX_WAITING = 8, 1024  # the worker's defaults of --max-loras and --max-waiting-requests
MIN_REQUESTS = {"cpu": "100m", "memory": "512Mi"}
"""Of a worker without CPU and memory in its manifest. Without requests its pod is BestEffort, as GPUs do not count: evicted first."""
MIN_READY_SECONDS = 10
"""Cluster DNS caches addresses of workers for 5 seconds, and without an index routers discover workers only through DNS."""


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
    # Workers and routers do not use the API server.
    return make_child(service, ACCOUNTS, service.name, names.WORKER, automountServiceAccountToken=False)


def _headless_service(service: InferenceService) -> Object:
    spec = {
        "clusterIP": "None",
        "selector": names.selector(service, names.WORKER),
        # Routers connect to addresses of pods. For HTTP, Istio's sidecars route by the Host header, which is no name of a service then, and
        # send plain text, which STRICT refuses (istio#34679). For TCP they have a listener with mTLS for each pod.
        "ports": [{"name": "http", "port": names.WORKER_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "tcp"}],
    }
    return make_child(service, KUBE_SERVICES, names.workers_service(service), names.WORKER, spec=spec)


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
        rolling=step.strategy,
        min_ready_seconds=MIN_READY_SECONDS,
        paused=step.paused,
    )


def _template(service: InferenceService, settings: Settings, commit: str) -> Object:
    source = model_source(service.spec, commit)
    shared = [*source.mounted, *redis.mounted(service, settings, names.WORKER)]
    mounted = [pods.TMP, pods.SHM, *shared]
    if service.spec.engine.runtime == "Fairlead":
        spec = pods.pod_spec(service, settings, names.WORKER, _container(service, settings, source, mounted), mounted)
        template: Object = {"spec": spec}
    else:
        agent = engine_pod.agent(service, settings, source, shared, _identity(service, settings, {}))
        engine = engine_pod.engine(service, settings, source, _resources(service, settings))
        spec = pods.pod_spec(service, settings, names.WORKER, agent, [*mounted, engine_pod.AGENT_TMP])
        template = {"metadata": {"annotations": engine_pod.ANNOTATIONS}, "spec": {**spec, "initContainers": [engine]}}
    template["spec"] |= placement(service, count_gpus(service, settings))
    return pods.finish(service, names.WORKER, worker_revision(service), template, service.spec.pod_template)


def _container(service: InferenceService, settings: Settings, source: ModelSource, mounted: list[pods.Mounted]) -> Object:
    own = [*_identity(service, settings, _warmup(service, settings)), *source.env, *groups.environment(service, worker_revision(service))]
    return pods.make_container(
        settings,
        names.WORKER,
        worker_image(service, settings),
        ["fairlead-worker"],
        arguments(service, source),
        mounted,
        env=engine_pod.override(own, engine_pod.engine_environment(service)),
        resources=_resources(service, settings),
        **pods.SERVING,
    )


def _identity(service: InferenceService, settings: Settings, more: Mapping[str, object]) -> list[Object]:
    """Return the settings that have no flag. The kubelet expands `$(POD_IP)`, which stands before them. `more`: further settings."""
    variables: dict[str, object] = {
        "FAIRLEAD_ADVERTISE": f"$(POD_IP):{names.WORKER_PORT}",
        "FAIRLEAD_ADMIN_PORT": names.WORKER_ADMIN_PORT,
        "FAIRLEAD_INDEX_NAMESPACE": names.index_namespace(service),
        **redis.variables(settings),
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
    return {"FAIRLEAD_WARMUP_TOKENS": engine.warmup_tokens, "FAIRLEAD_PEERS": names.workers_url(service, settings.cluster_domain)}


def arguments(service: InferenceService, source: ModelSource) -> list[str]:
    """Return the command line of a worker. Arguments of the user come last, because the last value of a flag is used."""
    engine, cache = service.spec.engine, service.spec.engine.kv_cache
    loras = [f"--lora-modules={name}={uri}" for name, uri in source.adapters.items()]
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
        "scheduling-policy": None if engine.scheduling_policy is None else DEFINITIONS[engine.scheduling_policy].fairlead,
        "kv-pages": cache.pages,
        "kv-cache-memory-bytes": None if cache.size is None else round(quantity(cache.size)),
        "kv-cache-dtype": cache.dtype.lower() if cache.dtype != "Auto" else None,
        "host-kv-cache-bytes": None if cache.host_size is None else round(quantity(cache.host_size)),
        "tensor-parallel-size": engine.tensor_parallel if engine.tensor_parallel > 1 else None,
        "nnodes": engine.nodes if engine.nodes > 1 else None,
        "itl-target-ms": engine.itl_target_milliseconds,
        "quantization": engine.quantization.lower() if engine.quantization != "None" else None,
        "max-waiting-requests": engine.max_waiting_requests if engine.max_waiting_requests != DEFAULT_MAX_WAITING else None,
        "speculative-config": _speculation(engine, source),
        "max-loras": len(loras) if len(loras) > DEFAULT_MAX_LORAS else None,
    }
    return [*pods.command_line(flags), *loras, *engine.args]


def _speculation(engine: Engine, source: ModelSource) -> str | None:
    if engine.speculative_decoding is None:
        return None
    config = {"method": SPECULATIVE_METHODS[engine.speculative_decoding.method]}
    return json.dumps(config | ({"model": source.draft} if source.draft else {}))


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
