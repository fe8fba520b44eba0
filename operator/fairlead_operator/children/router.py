"""The routers: a Deployment behind the Service that clients use."""

import json
from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import batch, canary, model_routes, pods, redis, router_autoscaler, router_tls, secrets, security
from fairlead_operator.objects import Object
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import non_default_fields, pin, router_revision, scales_to_zero
from fairlead_operator.rollout.images import router_image
from fairlead_operator.rollout.step import SURGE
from fairlead_operator.rollout.strategy import is_pausing
from fairlead_operator.router_size import replicas_to_apply
from fairlead_operator.settings import Settings

COUNT = "router-replicas"
KEY_FILE = PurePosixPath("/etc/fairlead/keys/keys.yaml")
RESPONSES_FILE = PurePosixPath("/etc/fairlead/responses/secret")
"""Secret for the keys of stored responses. Only routers mount it: neither workers nor Redis can derive a key."""


def objects(service: InferenceService, settings: Settings, observed: Observed | None = None) -> list[Object]:
    """Return the objects of the routers. A ControllerRevision stores a template before its use. Routers always surge: they need no GPU."""
    seen = observed or Observed()
    pinned = pin(service, names.ROUTER, router_revision(service), _template(service, settings), seen.revisions)
    paused = is_pausing(service, seen.deployments.get(names.ROUTER))
    budget = pods.disruption_budget(service, names.ROUTER, {"maxUnavailable": 1})
    autoscaler = router_autoscaler.objects(service) if router_autoscaler.KIND in seen.served else []
    replicas = replicas_to_apply(service, seen.deployments.get(names.ROUTER))
    certificate = router_tls.objects(service, settings) if router_tls.CERTIFICATE in seen.served else []
    deployment = _deployment(service, replicas, _count_routers(pinned.template, service), paused)
    routes = model_routes.objects(service, settings, seen.other_services)
    return [
        *_secrets(service, settings),
        _service(service, seen),
        *certificate,
        *routes,
        *pinned.revisions,
        deployment,
        *autoscaler,
        budget,
    ]


def _count_routers(template: Object, service: InferenceService) -> Object:
    """Return a stored template with the present number of routers, which is no part of a revision. Without Redis each enforces its share
    of the keys' rates, so a change restarts them."""
    for container in template["spec"]["containers"]:
        flags = container.get("args") or []
        container["args"] = [f"--{COUNT}={service.spec.routing.replicas}" if flag.startswith(f"--{COUNT}=") else flag for flag in flags]
    return template


def _secrets(service: InferenceService, settings: Settings) -> list[Object]:
    """Return the secret for the keys of stored responses; none without Redis, which stores them."""
    name = names.responses_secret(service)
    return [secrets.build_random(service, name, names.ROUTER, RESPONSES_FILE.name)] if settings.redis_url else []


def _service(service: InferenceService, observed: Observed) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(service, service.name, names.ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(service, names.ROUTER),
            "ports": [
                *router_tls.service_ports(service, observed),
                *_picker(service, {"name": "grpc", "port": names.PICKER_PORT, "targetPort": "picker", "protocol": "TCP"}),
            ],
        },
    }


def _picker(service: InferenceService, port: Object) -> list[Object]:
    """Return `port` if the routers are the endpoint picker of a gateway."""
    return [port] if service.spec.exposure.picks_endpoints else []


def _deployment(service: InferenceService, replicas: int | None, template: Object, paused: bool) -> Object:
    return pods.deployment(
        service,
        names.ROUTER,
        replicas=replicas,
        template=template,
        strategy=SURGE,
        paused=paused,
    )


def _template(service: InferenceService, settings: Settings) -> Object:
    container: Object = {
        "name": "router",
        "image": router_image(service, settings),
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["fairlead-router"],
        "args": arguments(service, settings),
        "env": [{"name": "HOME", "value": "/tmp"}, *_responses_variable(settings), *pods.tracing(settings)],
        "ports": [
            {"name": names.scheme(service), "containerPort": router_tls.port_number(service), "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ROUTER_ADMIN_PORT, "protocol": "TCP"},
            *_picker(service, {"name": "picker", "containerPort": names.PICKER_PORT, "protocol": "TCP"}),
        ],
        "resources": pods.CONTROL_RESOURCES,
        "securityContext": security.container_context(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *_mounts(service, settings), *redis.mounts(settings)],
        "startupProbe": pods.probe("/health", period=2, failures=60),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "livenessProbe": pods.liveness(failures=3),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    volumes = [{"name": "tmp", "emptyDir": {}}, *_volumes(service, settings), *redis.volumes(service, settings, names.ROUTER)]
    spec = pods.pod_spec(service, settings, names.ROUTER, container, volumes)
    return pods.finish(service, names.ROUTER, router_revision(service), {"spec": spec}, service.spec.router.pod_template)


def _responses_variable(settings: Settings) -> list[Object]:
    """Return the variable with the file of `responses_secret`. Routers of older images ignore a variable, and refuse a flag."""
    return [{"name": "FAIRLEAD_RESPONSES_SECRET_FILE", "value": str(RESPONSES_FILE)}] if settings.redis_url else []


def _volumes(service: InferenceService, settings: Settings) -> list[Object]:
    """Return the volumes. The Secret is mounted as a folder, because the kubelet does not update files that are mounted with subPath."""
    split = list(canary.router_volumes(service))
    split += batch.secret_volumes(service) + router_tls.volumes(service) + model_routes.volumes(service)
    if settings.redis_url:
        split.append({"name": "responses", "secret": {"secretName": names.responses_secret(service), "defaultMode": 0o440}})
    if service.spec.access is None:
        return split
    secret = service.spec.access.keys_secret_ref
    source = {"secretName": secret.name, "items": [{"key": secret.key, "path": KEY_FILE.name}], "defaultMode": 0o440}
    return [{"name": "api-keys", "secret": source}, *split]


def _mounts(service: InferenceService, settings: Settings) -> list[Object]:
    keys = [{"name": "api-keys", "mountPath": str(KEY_FILE.parent), "readOnly": True}] if service.spec.access is not None else []
    responses = [{"name": "responses", "mountPath": str(RESPONSES_FILE.parent), "readOnly": True}] if settings.redis_url else []
    return [
        *keys,
        *responses,
        *canary.router_mounts(service),
        *batch.secret_mounts(service),
        *router_tls.mounts(service),
        *model_routes.mounts(service),
    ]


def arguments(service: InferenceService, settings: Settings) -> list[str]:
    workers = f"{names.workers_service(service)}.{service.namespace}.svc.{settings.cluster_domain}"
    routing = service.spec.routing
    flags: dict[str, object] = {
        "service-name": service.name,
        "served-model-name": service.served_model_name,
        "host": "0.0.0.0",
        "port": router_tls.port_number(service),
        **router_tls.flags(service),
        **model_routes.flags(service),
        "admin-port": names.ROUTER_ADMIN_PORT,
        "index-namespace": names.index_namespace(service),
        **redis.flags(service, settings),
        "workers": f"dns://{workers}:{names.WORKER_PORT}",
        "worker-admin-port": names.WORKER_ADMIN_PORT,
        "policy": routing.policy,
        "drain-timeout": service.spec.rollout.drain_timeout_seconds,
        # Only values other than the default: routers of older images do not have these flags.
        "forwarding-mode": routing.forwarding_mode.lower() if routing.forwarding_mode != "Proxy" else "",
        "metrics-names": routing.metrics_names.lower() if routing.metrics_names != "Fairlead" else "",
        "index-mode": routing.index_mode.lower() if routing.index_mode != "Auto" else "",
        "picker-port": names.PICKER_PORT if service.spec.exposure.picks_endpoints else "",
        **batch.router_flags(service, settings),
        "canary-file": canary.SPLIT_FILE if service.spec.rollout.canary is not None else "",
    }
    if non_default_fields(routing, "hold_timeout_seconds"):
        flags["hold-timeout"] = float(routing.hold_timeout_seconds)
    if (slo := service.spec.slo) is not None:
        classes = [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in slo.classes]
        flags["slo-classes"] = json.dumps(classes, separators=(",", ":")) if classes else ""
        flags["default-slo-class"] = slo.default_class or ""
    if service.spec.access is not None:
        flags["api-keys-file"] = KEY_FILE
        if not settings.redis_url:
            flags[COUNT] = routing.replicas
    alone = ["--ready-without-workers"] if scales_to_zero(service) else []
    return [f"--{flag}={value}" for flag, value in flags.items() if value != ""] + alone + list(routing.args)
