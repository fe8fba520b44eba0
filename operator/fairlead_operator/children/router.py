"""The routers: a Deployment behind the Service that clients use."""

import json
from pathlib import PurePosixPath

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import batch, canary, model_routes, pods, redis, router_tls, secrets
from fairlead_operator.kube.kinds import AUTOSCALERS, CERTIFICATES, KUBE_SERVICES, make_child
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


def objects(service: InferenceService, settings: Settings, observed: Observed) -> list[Object]:
    """Return the objects of the routers. A ControllerRevision stores a template before its use. Routers always surge: they need no GPU."""
    pinned = pin(service, names.ROUTER, router_revision(service), _template(service, settings), observed.revisions)
    live = observed.deployments.get(names.ROUTER)
    deployment = pods.deployment(
        service,
        names.ROUTER,
        replicas=replicas_to_apply(service, live),
        template=_count_routers(pinned.template, service),
        rolling=SURGE,
        paused=is_pausing(service, live),
    )
    return [
        *_secrets(service, settings),
        _service(service, observed),
        *(router_tls.objects(service, settings) if CERTIFICATES.kind in observed.served else []),
        *model_routes.objects(service, settings, observed.other_services),
        *pinned.revisions,
        deployment,
        *(_autoscaler(service) if AUTOSCALERS.kind in observed.served else []),
        pods.disruption_budget(service, names.ROUTER, {"maxUnavailable": 1}),
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
    name = names.random_secret(service, "responses")
    return [secrets.build_random(service, name, names.ROUTER, RESPONSES_FILE.name)] if settings.redis_url else []


def _service(service: InferenceService, observed: Observed) -> Object:
    picker = _picker(service, {"name": "grpc", "port": names.PICKER_PORT, "targetPort": "picker", "protocol": "TCP"})
    ports = [*router_tls.service_ports(service, observed), *picker]
    spec = {"type": "ClusterIP", "selector": names.selector(service, names.ROUTER), "ports": ports}
    return make_child(service, KUBE_SERVICES, service.name, names.ROUTER, spec=spec)


def _autoscaler(service: InferenceService) -> list[Object]:
    """Return the autoscaler; nothing without `spec.router.autoscaling`.

    The target is an amount of CPU, not a share of the request: one event loop limits a router, whatever it requests.
    """
    autoscaling, name = service.spec.router.autoscaling, names.deployment(service, names.ROUTER)
    if autoscaling is None:
        return []
    target = {"type": "AverageValue", "averageValue": autoscaling.target_cpu}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": service.spec.routing.replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "ContainerResource", "containerResource": {"name": "cpu", "container": "router", "target": target}}],
    }
    return [make_child(service, AUTOSCALERS, name, names.ROUTER, spec=spec)]


def _picker(service: InferenceService, port: Object) -> list[Object]:
    """Return `port` if the routers are the endpoint picker of a gateway."""
    return [port] if service.spec.exposure.picks_endpoints else []


def _template(service: InferenceService, settings: Settings) -> Object:
    keys, access = list[pods.Mounted](), service.spec.access
    if access is not None:
        secret = access.keys_secret_ref
        keys = [pods.Mounted("api-keys", KEY_FILE.parent, pods.secret_source(secret.name, {secret.key: KEY_FILE.name}))]
    responses, env = list[pods.Mounted](), [{"name": "HOME", "value": "/tmp"}]
    if settings.redis_url:
        responses = [pods.Mounted("responses", RESPONSES_FILE.parent, pods.secret_source(names.random_secret(service, "responses")))]
        env.append({"name": "FAIRLEAD_RESPONSES_SECRET_FILE", "value": str(RESPONSES_FILE)})  # routers of older images would refuse a flag
    files = [*canary.mounted_split(service), *batch.mounted_secret(service), *router_tls.mounted(service), *model_routes.mounted(service)]
    login = redis.mounted(service, settings, names.ROUTER)
    container = pods.make_container(
        settings,
        names.ROUTER,
        router_image(service, settings),
        ["fairlead-router"],
        arguments(service, settings),
        [pods.TMP, *keys, *responses, *files, *login],
        env=[*env, *pods.tracing(settings)],
        ports=[
            {"name": names.scheme(service), "containerPort": router_tls.port_number(service), "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ROUTER_ADMIN_PORT, "protocol": "TCP"},
            *_picker(service, {"name": "picker", "containerPort": names.PICKER_PORT, "protocol": "TCP"}),
        ],
        resources=pods.CONTROL_RESOURCES,
        **pods.probes(startup_period=2, liveness_failures=3),
    )
    spec = pods.pod_spec(service, settings, names.ROUTER, container, [pods.TMP, *keys, *files, *responses, *login])
    return pods.finish(service, names.ROUTER, router_revision(service), {"spec": spec}, service.spec.router.pod_template)


def arguments(service: InferenceService, settings: Settings) -> list[str]:
    routing, slo = service.spec.routing, service.spec.slo
    classes = [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in slo.classes] if slo is not None else []
    flags: dict[str, object] = {
        "service-name": service.name,
        "served-model-name": service.served_model_name,
        "host": "0.0.0.0",
        "port": router_tls.port_number(service),
        **router_tls.flags(service),
        **model_routes.flags(service),
        "admin-port": names.ROUTER_ADMIN_PORT,
        "index-namespace": names.index_namespace(service),
        **redis.flags(settings),
        "workers": names.workers_url(service, settings.cluster_domain),
        "worker-admin-port": names.WORKER_ADMIN_PORT,
        "policy": routing.policy,
        "drain-timeout": service.spec.rollout.drain_timeout_seconds,
        # Only values other than the default: routers of older images do not have these flags.
        "forwarding-mode": routing.forwarding_mode.lower() if routing.forwarding_mode != "Proxy" else None,
        "metrics-names": routing.metrics_names.lower() if routing.metrics_names != "Fairlead" else None,
        "index-mode": routing.index_mode.lower() if routing.index_mode != "Auto" else None,
        "picker-port": names.PICKER_PORT if service.spec.exposure.picks_endpoints else None,
        **batch.router_flags(service, settings),
        "canary-file": canary.SPLIT_FILE if service.spec.rollout.canary is not None else None,
        "hold-timeout": float(routing.hold_timeout_seconds) if non_default_fields(routing, "hold_timeout_seconds") else None,
        "slo-classes": json.dumps(classes, separators=(",", ":")) if classes else None,
        "default-slo-class": slo.default_class if slo is not None else None,
        "api-keys-file": KEY_FILE if service.spec.access is not None else None,
        COUNT: routing.replicas if service.spec.access is not None and not settings.redis_url else None,
    }
    alone = ["--ready-without-workers"] if scales_to_zero(service) else []
    return [*pods.command_line(flags), *alone, *routing.args]
