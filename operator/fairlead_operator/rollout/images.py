"""Which images a service gets: its own, those that its pods already run, or the operator's newest.

The choice is put into the spec (`engine.image`, `routing.image`) from which objects and status are built. So another image is another
revision, with its own stored template, strategy and canary, like an edit by the user. Pure.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.engine_runtime import ENGINES, Runtime
from fairlead_operator.objects import Body
from fairlead_operator.observed import Observed
from fairlead_operator.revisions import belongs_to, find_revision, router_revision, worker_revision
from fairlead_operator.rollout.strategy import revision_of
from fairlead_operator.settings import Settings

UPDATING = ("RollingOut", "Observing")
"""Phases of `status.imageUpdate` in which the service runs, or is about to run, the images named there."""

GOING_BACK = ("RollingBack", "Failed")
"""Phases in which it runs, or returns to, the previous images."""


@dataclass(frozen=True)
class Images:
    """Images of the workers and of the routers. Empty: none yet."""

    worker: str = ""
    router: str = ""


def count_gpus(service: InferenceService, settings: Settings) -> int:
    """Return the GPUs of one pod. Without spec.resources.gpus it is the operator's default for each rank of the model."""
    resources, engine = service.spec.resources, service.spec.engine
    if resources.gpus is not None:
        return resources.gpus
    ranks = engine.tensor_parallel * service.spec.pipeline_stages
    return (1 if resources.is_explicit else settings.default_gpus) * ranks // engine.nodes


def worker_image(service: InferenceService, settings: Settings) -> str:
    """Return the image of the engine in a worker template that is rendered now."""
    if (runtime := service.spec.engine.runtime) != "Fairlead":
        return service.spec.engine.image or (settings.vllm_image if runtime == "VLLM" else settings.sglang_image)
    return service.spec.engine.image or (count_gpus(service, settings) and settings.worker_gpu_image) or settings.worker_image


def router_image(service: InferenceService, settings: Settings) -> str:
    """Return the image of a router template that is rendered now."""
    return service.spec.routing.image or settings.router_image


def image_of(template: Body, component: str) -> str:
    """Return the image of a pod template's own container, of a worker that of its engine; empty without one."""
    wanted = (names.ENGINE, names.WORKER) if component == names.WORKER else (component,)
    return next((str(one.get("image") or "") for one in _containers(template) if one.get("name") in wanted), "")


def runtime_of(template: Body) -> Runtime:
    """Return the runtime of a worker's pod template."""
    arguments = {arg for one in _containers(template) if one.get("name") == names.AGENT for arg in one.get("args") or []}
    return next((runtime for runtime in ENGINES if f"--runtime={runtime.lower()}" in arguments), "Fairlead")


def live_images(observed: Observed) -> Images:
    """Return the images of the templates that the Deployments got."""
    return Images(*(image_of(_applied_template(observed, component), component) for component in (names.WORKER, names.ROUTER)))


def newest_images(service: InferenceService, observed: Observed, settings: Settings) -> Images:
    """Return the operator's images for this service, and for a part whose image the user sets, the image that it has."""
    return with_own_images(service, observed, Images(worker_image(service, settings), router_image(service, settings)))


def apply_images(service: InferenceService, observed: Observed, settings: Settings) -> InferenceService:
    """Return the service with the images of its templates. `service` is as the user wrote it, with its last status.

    An update is read from the status, so that it is stored before anything changes.
    """
    wanted, update = live_images(observed), service.status.image_update
    follows = service.spec.rollout.engine_version == "Auto"
    if follows and update is not None and update.phase in UPDATING:
        wanted = Images(update.worker_image or wanted.worker, update.router_image or wanted.router)
    elif follows and update is not None and update.phase in GOING_BACK:
        wanted = Images(update.previous_worker_image or wanted.worker, update.previous_router_image or wanted.router)
    if follows and update is not None and update.phase in (*UPDATING, *GOING_BACK) and drains_for_budget(service, settings):
        spec = service.spec
        service = replace(service, spec=spec.model_copy(update={"rollout": spec.rollout.model_copy(update={"strategy": "DrainFirst"})}))
    if not _WORKER.is_set(service):
        follows_worker = follows and not _is_of_other_runtime(service, observed, wanted)
        service = _choose(service, observed, _WORKER, wanted.worker if follows_worker else "")
    if not _ROUTER.is_set(service):
        service = _choose(service, observed, _ROUTER, wanted.router if follows else "")
    return _without_trial(service) if follows and update is not None and update.phase == "RollingBack" else service


def _is_of_other_runtime(service: InferenceService, observed: Observed, images: Images) -> bool:
    """Return whether the image of the workers is that of another engine, from before `spec.engine.runtime` was changed."""
    stored = [body["data"]["template"] for body in observed.revisions if belongs_to(body, service, names.WORKER)]
    templates = [_applied_template(observed, names.WORKER), *stored]
    return any(image_of(one, names.WORKER) == images.worker and runtime_of(one) != service.spec.engine.runtime for one in templates)


def _without_trial(service: InferenceService) -> InferenceService:
    """Return the service with its revision promoted without a canary: the images to which it goes back were proven before.

    `spec.rollout.canary` stays, since the routers' revision depends on it.
    """
    rollout = service.spec.rollout
    if rollout.canary is None:
        return service
    canary = rollout.canary.model_copy(update={"promoted_revision": worker_revision(service)})
    return replace(service, spec=service.spec.model_copy(update={"rollout": rollout.model_copy(update={"canary": canary})}))


def surge_gpus(service: InferenceService, settings: Settings) -> int:
    """Return the GPUs that an update may use beside those of the present workers: of a surge worker, and of canaries."""
    rollout, limit = service.spec.rollout, settings.waves.max_surge_gpus
    each = count_gpus(service, settings) * service.spec.engine.nodes if service.spec.desired_replicas else 0
    canaries = each * rollout.canary.replicas if rollout.canary is not None else 0
    drains = rollout.strategy == "DrainFirst" or (rollout.strategy == "Auto" and limit is not None and each + canaries > limit)
    return canaries if drains else each + canaries


def has_surge(observed: Observed) -> bool:
    """Return whether more workers exist than are wanted, or a canary."""
    main = observed.deployments.get(names.WORKER) or {}
    wanted, total = ((main.get(part) or {}).get("replicas") or 0 for part in ("spec", "status"))
    return names.CANARY in observed.deployments or total > wanted


def drains_for_budget(service: InferenceService, settings: Settings) -> bool:
    """Return whether strategy Auto must drain first in an update, because its surge worker exceeds the whole budget."""
    surging = replace(settings, waves=replace(settings.waves, max_surge_gpus=None))
    return service.spec.rollout.strategy == "Auto" and surge_gpus(service, settings) < surge_gpus(service, surging)


def with_own_images(service: InferenceService, observed: Observed, images: Images) -> Images:
    """Return `images`, for a part whose image the user sets with the image that it has."""
    live = live_images(observed)
    worker = live.worker if _WORKER.is_set(service) else images.worker
    return Images(worker, live.router if _ROUTER.is_set(service) else images.router)


@dataclass(frozen=True)
class _Part:
    """The workers or the routers: their component, the section of the spec with their image, and the digest of their revision."""

    component: str
    section: str
    digest: Callable[[InferenceService], str]

    def with_image(self, service: InferenceService, image: str | None) -> InferenceService:
        section = getattr(service.spec, self.section).model_copy(update={"image": image})
        return replace(service, spec=service.spec.model_copy(update={self.section: section}))

    def is_set(self, service: InferenceService) -> bool:
        """Return whether the user sets the image."""
        template = service.spec.pod_template if self.component == names.WORKER else service.spec.router.pod_template
        in_template = template is not None and bool(image_of({"spec": template.spec}, self.component))
        return bool(getattr(service.spec, self.section).image) or in_template


_WORKER = _Part(names.WORKER, "engine", worker_revision)
_ROUTER = _Part(names.ROUTER, "routing", router_revision)


def _choose(service: InferenceService, observed: Observed, part: _Part, wanted: str) -> InferenceService:
    """Return the service with `wanted` as the image of a part, without it where the spec's plain revision has that image.

    `wanted` is empty for a pinned service, and without a Deployment. Then the revision of this spec that was used last stays.
    """
    if not wanted:
        return next(_variants(service, observed, part), (service, {}))[0]
    plain, live = part.digest(service), _applied_template(observed, part.component)
    if (revision_of(live), image_of(live, part.component)) == (plain, wanted):
        return service
    held = find_revision(service, part.component, plain, observed.revisions)
    return service if held is not None and _stored_image(held, part.component) == wanted else part.with_image(service, wanted)


def _variants(service: InferenceService, observed: Observed, part: _Part) -> Iterator[tuple[InferenceService, Body]]:
    """Yield the stored revisions of this spec, with whatever image, the one used last first, and the service with that image."""
    stored = [body for body in observed.revisions if belongs_to(body, service, part.component)]
    plain = part.digest(service)
    for body in sorted(stored, key=lambda one: int(one.get("revision") or 0), reverse=True):
        explicit = part.with_image(service, _stored_image(body, part.component))
        for variant in (service, explicit):
            digest = plain if variant is service else part.digest(variant)
            if body["metadata"]["name"] == f"{names.deployment(service, part.component)}-{digest}":
                yield variant, body
                break


def find_stored_model(service: InferenceService, observed: Observed) -> str:
    """Return `--model` of this spec's stored revision, with whatever image; empty without one.

    A new image is a new revision, and must not load another commit of the model.
    """
    for _, body in _variants(_WORKER.with_image(service, None), observed, _WORKER):
        return model_of(body["data"]["template"])
    return ""


def model_of(template: Body) -> str:
    """Return the value of `--model` in a worker's pod template; empty without one."""
    arguments = [str(arg) for one in _containers(template) if one.get("name") in names.SERVING for arg in one.get("args") or []]
    return next((arg.removeprefix("--model=") for arg in arguments if arg.startswith("--model=")), "")


def _containers(template: Body) -> list[Body]:
    spec = template.get("spec") or {}
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _stored_image(revision: Body, component: str) -> str:
    return image_of(revision["data"]["template"], component)


def _applied_template(observed: Observed, component: str) -> Body:
    """Return the template that the component's Deployment got, from its ControllerRevision.

    The Deployment's own template may have other images: admission policies rewrite them to a registry's mirror. It counts where no
    revision is stored.
    """
    deployment = observed.deployments.get(component) or {}
    live: Body = (deployment.get("spec") or {}).get("template") or {}
    digest, owners = revision_of(live), _owners(deployment)
    for body in observed.revisions:
        metadata = body["metadata"]
        is_of_component = (metadata.get("labels") or {}).get(names.COMPONENT) == component
        if is_of_component and metadata["name"].rpartition("-")[2] == digest and _owners(body) == owners:
            stored: Body = body["data"]["template"]
            return stored
    return live


def _owners(body: Body) -> set[str]:
    return {str(one.get("uid")) for one in (body.get("metadata") or {}).get("ownerReferences") or []}
