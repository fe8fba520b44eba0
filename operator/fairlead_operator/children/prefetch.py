"""A Job that downloads the models of a service into its cache, ahead of workers (`spec.model.cache.prefetch`).

The comparison is KServe's LocalModelCache, which has an object of its own and a Job for each node. Here the cache is one claim. The name of
the Job is a digest of its pod, because a Job's template is immutable: another model or image is another Job.
"""

from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.cache import is_downloaded
from fairlead_operator.children import pods, security
from fairlead_operator.children.model_source import CACHE_MOUNT, ModelSource, model_source
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Object
from fairlead_operator.settings import Settings

RETRIES = 100
"""Restarts of the container with the kubelet's backoff (5 minutes at most), so about eight hours: a hub may be away for a while."""
_OF_WORKERS_ONLY = ("affinity", "resourceClaims", "topologySpreadConstraints", "initContainers", "runtimeClassName", "priorityClassName")


def objects(service: InferenceService, settings: Settings, commit: str = "") -> list[Object]:
    """Return the Job; none without `prefetch`. `commit`: to which an `hf://` model without one was resolved."""
    if not is_prefetched(service):
        return []
    spec = _pod_spec(service, settings, commit)
    digest = names.digest([service.name, service.uid, spec])
    labels = names.selector(service, names.PREFETCH) | {names.REVISION: digest}
    metadata = names.metadata(service, f"{service.name[:40]}-prefetch-{digest}", names.PREFETCH)
    job = {"backoffLimit": RETRIES, "template": {"metadata": {"labels": labels}, "spec": spec}}
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job}]


def is_prefetched(service: InferenceService) -> bool:
    cache = service.spec.model.cache
    return cache is not None and cache.prefetch == "Enabled"


def _pod_spec(service: InferenceService, settings: Settings, commit: str) -> Object:
    source = model_source(service.spec, commit)
    container: Object = {
        "name": "worker",  # spec.podTemplate gives the container of this name its proxies and certificates
        "image": service.spec.engine.image or settings.worker_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["fairlead-prefetch"],
        "args": _arguments(source),
        "env": [pods.downward("FAIRLEAD_POD_NAME", "metadata.name"), {"name": "HOME", "value": "/tmp"}, *source.env],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": security.container_context(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *(one for one in source.mounts if one["mountPath"] == CACHE_MOUNT)],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    volumes = [{"name": "tmp", "emptyDir": {}}, *(one for one in source.volumes if one["name"] == "cache")]
    spec = pods.pod_spec(service, settings, names.PREFETCH, container, volumes)
    del spec["topologySpreadConstraints"], spec["terminationGracePeriodSeconds"]
    return {**merge(spec, _of_the_template(service)), "restartPolicy": "OnFailure"}


def _arguments(source: ModelSource) -> list[str]:
    models = [uri for uri in (source.uri, source.draft) if is_downloaded(uri)]
    return [f"--cache={CACHE_MOUNT}", *(f"--adapter={uri}" for uri in source.adapters.values() if is_downloaded(uri)), *models]


def _of_the_template(service: InferenceService) -> dict[str, Any]:
    """Return the parts of `spec.podTemplate` that a download needs: nodes, volumes, pull secrets, the worker container's environment."""
    template = service.spec.pod_template
    if template is None:
        return {}
    spec = {key: value for key, value in template.spec.items() if key not in (*_OF_WORKERS_ONLY, "containers")}
    kept = ("name", "image", "env", "envFrom", "volumeMounts")
    for container in template.spec.get("containers") or []:
        if container.get("name") == "worker":
            spec["containers"] = [{key: value for key, value in container.items() if key in kept}]
    return spec
