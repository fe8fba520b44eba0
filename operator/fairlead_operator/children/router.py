"""The routers: a Deployment behind the Service that clients use."""

from collections.abc import Iterable, Mapping
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.children import Object, pods, security
from fairlead_operator.revisions import pinned, said
from fairlead_operator.settings import Settings


def revision(service: InferenceService) -> str:
    return names.digest(
        [said(service.spec.routing, "policy", "index_mode"), said(service.spec.rollout, "drain_timeout"), service.served_model_name]
    )


def objects(service: InferenceService, settings: Settings, revisions: Iterable[Mapping[str, Any]] = ()) -> list[Object]:
    """`revisions`: the ControllerRevisions that are seen. A template is kept before it is used."""
    pin = pinned(service, names.ROUTER, revision(service), _template(service, settings), revisions)
    return [_service(service), *pin.revisions, _deployment(service, pin.template), pods.disruption_budget(service, names.ROUTER, 1)]


def _service(service: InferenceService) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(service, service.name, names.ROUTER),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(service, names.ROUTER),
            "ports": [{"name": "http", "port": names.SERVICE_PORT, "targetPort": "http", "protocol": "TCP", "appProtocol": "http"}],
        },
    }


def _deployment(service: InferenceService, template: Object) -> Object:
    return pods.deployment(
        service,
        names.ROUTER,
        replicas=service.spec.routing.replicas,
        template=template,
        strategy={"maxSurge": 1, "maxUnavailable": 0},
    )


def _template(service: InferenceService, settings: Settings) -> Object:
    container: Object = {
        "name": "router",
        "image": settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["fairlead-router"],
        "args": arguments(service, settings),
        "env": [{"name": "HOME", "value": "/tmp"}],
        "ports": [{"name": "http", "containerPort": names.ROUTER_PORT, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": security.container(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "startupProbe": pods.probe("/health", period=2, failures=60),
        "readinessProbe": pods.probe("/ready", period=2, failures=2),
        "livenessProbe": pods.liveness(failures=3),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    spec = pods.pod_spec(service, names.ROUTER, container, [{"name": "tmp", "emptyDir": {}}])
    return pods.labelled(service, names.ROUTER, revision(service), {"spec": spec})


def arguments(service: InferenceService, settings: Settings) -> list[str]:
    workers = f"{names.workers_service(service)}.{service.namespace}.svc.{settings.cluster_domain}"
    mode = service.spec.routing.index_mode
    flags: dict[str, object] = {
        "service-name": service.name,
        "served-model-name": service.served_model_name,
        "host": "0.0.0.0",
        "port": names.ROUTER_PORT,
        "index-namespace": names.index_namespace(service),
        "redis-url": settings.redis_url,
        "workers": f"dns://{workers}:{names.WORKER_PORT}",
        "policy": service.spec.routing.policy,
        "drain-timeout": service.spec.rollout.drain_seconds,
        "index-mode": "" if mode == "auto" else mode,  # the default is left out: routers' images of before start with these flags too
    }
    return [f"--{flag}={value}" for flag, value in flags.items() if value != ""]
