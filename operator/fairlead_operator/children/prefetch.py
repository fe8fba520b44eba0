"""A Job that downloads the models of a service into its cache, ahead of workers (`spec.model.cache.prefetch`).

The comparison is KServe's LocalModelCache, which has an object of its own and a Job for each node. Here the cache is one claim. The name of
the Job is a digest of what the spec says about the download: another model is another Job. The operator's images and configuration are no
part of it, and a Job's template is immutable, so a Job that exists keeps its template.
"""

from collections.abc import Mapping
from typing import Any

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.fields import quantity
from fairlead_operator.api.model import is_downloaded
from fairlead_operator.children import engine_pod, pods
from fairlead_operator.children.model_source import CACHE_MOUNT, ModelSource, cache_volume, model_source
from fairlead_operator.kube.difference import APPLIED
from fairlead_operator.kube.kinds import JOBS, make_child
from fairlead_operator.kube.merge import merge
from fairlead_operator.objects import Body, Object
from fairlead_operator.observed import Observed
from fairlead_operator.rollout.images import live_images
from fairlead_operator.settings import Settings

RETRIES = 100
"""Restarts of the container with the kubelet's backoff (5 minutes at most), so about eight hours: a hub may be away for a while."""
_NO_SIDECAR_LABEL, _NO_SIDECAR_ANNOTATION = {"sidecar.istio.io/inject": "false"}, {"linkerd.io/inject": "disabled"}
"""A mesh's proxy may keep the pod from ending, and a download accepts no connections."""
_REQUESTS, _LIMITS = {"cpu": "500m", "memory": "1Gi"}, {"cpu": "4", "memory": "4Gi"}
"""Quotas may require limits. A download keeps no file in memory, and the page cache is freed before the limit is reached."""
_DIVIDED = ("cpu", "memory", "ephemeral-storage")  # resources of the container in spec.podTemplate that the Job gets too: no devices
_OF_WORKERS_ONLY = ("affinity", "resourceClaims", "topologySpreadConstraints", "initContainers", "runtimeClassName", "priorityClassName")


def objects(service: InferenceService, settings: Settings, observed: Observed, commit: str = "", own_image: str = "") -> list[Object]:
    """Return the Job; none without `prefetch`.

    `commit`: to which an `hf://` model without one was resolved. `own_image`: of the workers, where the user sets it.
    """
    if not is_prefetched(service):
        return []
    source, template = model_source(service.spec, commit), _read_template(service)
    pull_secrets = [one.name for one in service.spec.image_pull_secrets]
    if service.spec.engine.runtime != "Fairlead":  # the image of an engine has no fairlead-prefetch
        source.env, own_image = engine_pod.override(source.env, engine_pod.hub_environment(service)), ""
    wanted = [_arguments(source), source.env, cache_volume(service.spec.model.cache), template["spec"], pull_secrets, own_image]
    wanted += [template["metadata"]] if template["metadata"] else []  # services without it keep the Jobs of earlier releases
    digest = names.digest([service.name, service.uid, *wanted])
    name = f"{service.name[:40]}-prefetch-{digest}"
    # The operator's newest image comes to a service that has workers in its wave, not with a Job.
    image = service.spec.engine.image or live_images(observed).worker or settings.worker_image
    if service.spec.engine.runtime != "Fairlead":
        image = service.spec.routing.image or live_images(observed).router or settings.router_image
    no_sidecar = {"labels": _NO_SIDECAR_LABEL, "annotations": _NO_SIDECAR_ANNOTATION}
    containers: list[Object] = template["spec"].get("containers") or [{}]
    given = containers[0].get("resources") or {}
    pod_template = merge({"metadata": no_sidecar, "spec": _pod_spec(service, settings, source, image, given)}, template)
    pod_template["metadata"]["labels"] |= _NO_SIDECAR_LABEL
    pod_template["spec"]["restartPolicy"] = "OnFailure"
    job = {"backoffLimit": RETRIES, "template": pods.finish(service, names.PREFETCH, digest, pod_template, None)}
    made = make_child(service, JOBS, name, names.PREFETCH, spec=job)
    live = next((one for one in observed.jobs if one["metadata"]["name"] == name), None)
    if live is None or (live["metadata"].get("annotations") or {}).get(APPLIED) == names.digest(made):
        return [made]
    return [{**made, "spec": {**job, "template": _without_null(live["spec"]["template"])}}]


def is_prefetched(service: InferenceService) -> bool:
    cache = service.spec.model.cache
    return cache is not None and cache.prefetch == "Enabled"


def _pod_spec(service: InferenceService, settings: Settings, source: ModelSource, image: str, given: Object) -> Object:
    """Return the PodSpec. `given`: the resources of spec.podTemplate."""
    mounted = [pods.TMP, *(one for one in source.mounted if one.folder == CACHE_MOUNT)]
    container = pods.make_container(
        settings,
        names.WORKER,  # spec.podTemplate gives the container of this name its proxies and certificates
        image,
        ["fairlead-prefetch"],
        _arguments(source),
        mounted,
        env=[pods.downward("FAIRLEAD_POD_NAME", "metadata.name"), {"name": "HOME", "value": "/tmp"}, *source.env],
        resources=_defaults_beside(given),
    )
    spec = pods.pod_spec(service, settings, names.PREFETCH, container, mounted)
    del spec["topologySpreadConstraints"], spec["terminationGracePeriodSeconds"]
    return spec


def _defaults_beside(given: Mapping[str, Mapping[str, Any]]) -> Object:
    """Return the defaults, without those that contradict the user's amounts: Kubernetes refuses a request above its limit."""
    requests, limits = given.get("requests") or {}, given.get("limits") or {}
    wanted = {name: one for name, one in _REQUESTS.items() if name not in requests and _is_within(one, limits.get(name, one))}
    bounds = {name: one for name, one in _LIMITS.items() if name not in limits and _is_within(requests.get(name, one), one)}
    return {"requests": wanted, "limits": bounds}


def _is_within(request: Any, limit: Any) -> bool:
    """Return whether a request is at most its limit. False for amounts in a notation such as 8.: the user's stands alone."""
    try:
        return quantity(str(request)) <= quantity(str(limit))
    except ValueError:
        return False


def _arguments(source: ModelSource) -> list[str]:
    models = [uri for uri in (source.uri, source.draft) if is_downloaded(uri)]
    return [f"--cache={CACHE_MOUNT}", *(f"--adapter={uri}" for uri in source.adapters.values() if is_downloaded(uri)), *models]


def _without_null(template: Body) -> Any:
    """Return a template of the API server without null, such as that of `creationTimestamp`, which no field manager owns."""
    if isinstance(template, Mapping):
        return {key: _without_null(value) for key, value in template.items() if value is not None}
    return [_without_null(one) for one in template] if isinstance(template, list) else template


def _read_template(service: InferenceService) -> dict[str, Any]:
    """Return the parts of `spec.podTemplate` that a download needs: labels, nodes, volumes, and the worker container's environment."""
    template = service.spec.pod_template
    if template is None:
        return {"metadata": {}, "spec": {}}
    spec = {key: value for key, value in template.spec.items() if key not in (*_OF_WORKERS_ONLY, "containers")}
    kept = ("name", "image", "env", "envFrom", "volumeMounts", "securityContext")
    for container in template.spec.get("containers") or []:
        if container.get("name") in names.SERVING:
            spec["containers"] = [{key: value for key, value in container.items() if key in kept} | {"name": "worker"}]
            if resources := _read_resources(container):
                spec["containers"][0]["resources"] = resources
    return {"metadata": template.metadata.model_dump(mode="json", exclude_defaults=True), "spec": spec}


def _read_resources(container: Mapping[str, Any]) -> dict[str, Any]:
    given = {kind: (container.get("resources") or {}).get(kind) or {} for kind in ("requests", "limits")}
    divided = {kind: {name: value for name, value in amounts.items() if name in _DIVIDED} for kind, amounts in given.items()}
    return {kind: amounts for kind, amounts in divided.items() if amounts}
