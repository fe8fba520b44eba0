"""The update of one service to the operator's newest images: `status.imageUpdate`, the only state of a rollout over all services. Pure.

    Waiting → RollingOut → Observing → Current
              RollingOut, Observing → RollingBack → Failed → (other images, or another spec.rollout.restartedAt) → Waiting

Each phase is written to the status before the next reconcile acts on it (`images.apply_images`). So an operator may stop at any step.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.api.status import CanaryStatus, Condition, ImageUpdateStatus, UpdatePhase
from fairlead_operator.objects import Body, conditions_of, format_time, parse_time
from fairlead_operator.observed import Observed, Replicas
from fairlead_operator.rollout.image_faults import describe, find_image_fault, find_obstacle, find_other_fault
from fairlead_operator.rollout.images import (
    GOING_BACK,
    UPDATING,
    Images,
    has_surge,
    live_images,
    newest_images,
    surge_gpus,
    with_own_images,
)
from fairlead_operator.router_size import router_replicas
from fairlead_operator.settings import Settings

LATE_MARGIN = 60.0  # seconds beyond spec.rollout.progressDeadlineSeconds
MIN_REQUESTS = 100  # requests since the update began, below which the share of failed ones says nothing


@dataclass(frozen=True)
class Health:
    """The conditions by which an update is judged."""

    ready: Condition | None = None
    degraded: Condition | None = None
    progressing: Condition | None = None
    canary: CanaryStatus | None = None


def next_update(
    service: InferenceService, observed: Observed, settings: Settings, health: Health, now: datetime
) -> tuple[ImageUpdateStatus, float | None]:
    """Return the next `status.imageUpdate`, and when another may be due without any change (seconds since the epoch).

    `service`: as the user wrote it, with its last status. `health`: of this reconcile.
    """
    update = _Update(service, observed, settings, health, now)
    before = service.status.image_update
    if service.spec.rollout.engine_version == "Auto" and before is not None:
        if before.phase in UPDATING:
            return update.follow(before)
        if before.phase in GOING_BACK and update.repeats(before):
            return update.go_back(before), None
    return update.begin() if observed.fleet.admitted and update.may_begin else update.wait(), None


@dataclass(frozen=True)
class _Update:
    service: InferenceService
    observed: Observed
    settings: Settings
    health: Health
    now: datetime

    @property
    def live(self) -> Images:
        return live_images(self.observed)

    @property
    def newest(self) -> Images:
        return newest_images(self.service, self.observed, self.settings)

    @property
    def may_begin(self) -> bool:
        return self._phase() == "Waiting" and not self._obstacle() and self._knows_errors()

    def begin(self) -> ImageUpdateStatus:
        seen = self.observed.errors
        return self._status(
            "RollingOut",
            previous_worker_image=self.live.worker,
            previous_router_image=self.live.router,
            surge_gpus=surge_gpus(self.service, self.settings),
            start_time=self._now(),
            restarted_at=self.service.spec.rollout.restarted_at or "",
            error_percent_before=f"{100 * seen.rate_before:.3g}" if seen is not None and seen.rate_before is not None else "",
        )

    def wait(self) -> ImageUpdateStatus:
        phase = self._phase()
        if phase != "Waiting":
            return self._status(phase, message=self._reason(phase))
        return self._status(phase, surge_gpus=surge_gpus(self.service, self.settings), message=self._obstacle())

    def follow(self, before: ImageUpdateStatus) -> tuple[ImageUpdateStatus, float | None]:
        """Return the next status of an update that has begun."""
        fault = find_image_fault(self.health.degraded, self.health.progressing) or self._error_fault(before) or self._apply_fault(before)
        if fault and self.service.spec.rollout.revision is None:  # otherwise the pods are of a revision that the user chose
            return self._fail(before, fault), None
        waves = self.settings.waves
        if before.phase == "RollingOut":
            if not self._runs(Images(before.worker_image, before.router_image)):
                late_at = self._late_at(before)
                return self._continue(before, late_at), late_at if self.now.timestamp() < late_at else None
            seconds = waves.observation_seconds if self.service.spec.desired_replicas else 0.0
            begun = {"phase": "Observing", "start_time": self._now(), "held": False, "message": ""}
            return before.model_copy(update=begun), self.now.timestamp() + seconds
        ends = parse_time(before.start_time) + waves.observation_seconds
        if self.now.timestamp() < ends and self.service.spec.desired_replicas:
            return before.model_copy(update={"held": False, "message": ""}), ends
        return self.wait(), None

    def _late_at(self, before: ImageUpdateStatus) -> float:
        """Return when an update without progress gives its place to others, in seconds since the epoch.

        The Deployments' own deadline comes first. This one is for an update that no Deployment reports, such as one whose canary waits.
        """
        pods = [pod["metadata"].get("creationTimestamp") for pod in self.observed.pods]
        step = self.health.progressing.last_transition_time if self.health.progressing is not None else ""
        changed = [parse_time(one) for one in (before.start_time, step, *_changes(self.observed.deployments.values()), *pods)]
        return max(changed) + self.service.spec.rollout.progress_deadline_seconds + LATE_MARGIN

    def _continue(self, before: ImageUpdateStatus, late_at: float) -> ImageUpdateStatus:
        """Return the status of an update whose pods do not all run the new images yet."""
        is_late = self.now.timestamp() >= late_at
        held = self._is_held or is_late
        gpus = before.surge_gpus
        if held or before.held:  # a rollout to spec.rollout.revision may get a surge worker after the update was held
            gpus = surge_gpus(self.service, self.settings) if has_surge(self.observed) or not held else 0
        message = self._reason("Held") if self._is_held else self._hindrance() or (self._lateness() if is_late else "")
        return before.model_copy(update={"held": held, "surge_gpus": gpus, "message": message[:512]})

    @property
    def _is_held(self) -> bool:
        return self.service.spec.rollout.paused or self.service.spec.rollout.revision is not None

    def _lateness(self) -> str:
        ready = self.health.ready
        why = "" if ready is None or ready.status == "True" else f" {describe(ready)}"
        return (
            f"the update has made no progress for {self.service.spec.rollout.progress_deadline_seconds} s, so other services are updated "
            f"before it.{why} It goes on by itself; to leave this service out, set spec.rollout.engineVersion to Pinned"
        )

    def _hindrance(self) -> str:
        """Return what holds up an update that has begun; empty: nothing that needs help."""
        other, canary = find_other_fault(self.health.degraded), self.health.canary
        if canary is not None and canary.phase == "Paused":
            return f"the update waits for the promotion of its canary: set spec.rollout.canary.promotedRevision to {canary.revision}"
        return f"the update is held up by a fault that no image causes. {other}" if other else ""

    def repeats(self, failed: ImageUpdateStatus) -> bool:
        """Return whether another update would run the images that failed. Another spec.rollout.restartedAt asks for a new try."""
        same = (failed.worker_image, failed.router_image) == (self.newest.worker, self.newest.router)
        return same and failed.restarted_at == (self.service.spec.rollout.restarted_at or "")

    def go_back(self, failed: ImageUpdateStatus) -> ImageUpdateStatus:
        """Return the status of a failed update."""
        back = self._runs(Images(failed.previous_worker_image, failed.previous_router_image))
        return failed.model_copy(update={"phase": "Failed", "surge_gpus": 0}) if back else failed

    def _fail(self, before: ImageUpdateStatus, fault: str) -> ImageUpdateStatus:
        message = (
            f"the service went back to its previous images. {fault[:300]}. No other service is updated. Give the operator other images "
            "(chart: images), or try again: set spec.rollout.restartedAt; or leave this service out: spec.rollout.engineVersion Pinned"
        )
        return before.model_copy(update={"phase": "RollingBack", "start_time": self._now(), "held": False, "message": message[:512]})

    def _phase(self) -> UpdatePhase:
        live, newest, rollout = self.live, self.newest, self.service.spec.rollout
        if not live.worker or not live.router or live == newest:
            return "Current"
        if rollout.engine_version == "Pinned":
            return "Pinned"
        return "Held" if self._is_held else "Waiting"

    def _reason(self, phase: UpdatePhase) -> str:
        if phase == "Held":
            field = "paused" if self.service.spec.rollout.paused else "revision"
            return f"spec.rollout.{field} holds the update back: remove it"
        return "spec.rollout.engineVersion is Pinned: set it to Auto, or restart with spec.rollout.restartedAt" if phase == "Pinned" else ""

    def _obstacle(self) -> str:
        """Return why the service itself must not be updated now; empty: it only waits for its wave."""
        needed, limit = surge_gpus(self.service, self.settings), self.settings.waves.max_surge_gpus
        if limit is not None and needed > limit:
            return (
                f"the update needs {needed} GPUs beside those in use, and all updates together may use {limit}: raise the chart's "
                "rollout.maxSurgeGPUs, or set spec.rollout.strategy to Auto or DrainFirst"
            )
        if fault := find_obstacle(self.health.degraded):
            return f"the service is not updated while it has a fault. {fault}"
        return "" if self.service.spec.desired_replicas == 0 or self._runs(self.live) else "another rollout of this service is under way"

    def _knows_errors(self) -> bool:
        """Return whether the error rate before the update is known, or cannot be: no router is ready, or none answers."""
        return self.observed.errors is not None or not self.observed.has_ready_router

    def _error_fault(self, before: ImageUpdateStatus) -> str:
        seen = self.observed.errors
        if seen is None or seen.requests < MIN_REQUESTS:
            return ""
        known, rate = float(before.error_percent_before or 0) / 100, seen.errors / seen.requests
        if rate <= known + self.settings.waves.max_error_rate_increase:
            return ""
        return f"ErrorRate: {100 * rate:.3g} % of {seen.requests} requests failed since the update began, {100 * known:.3g} % before it"

    def _apply_fault(self, before: ImageUpdateStatus) -> str:
        """Return the refusal of an object that has kept the update from its pods for too long. No Deployment reports a deadline then."""
        degraded = self.health.degraded
        if before.phase != "RollingOut" or self._is_held or degraded is None:
            return ""
        if degraded.status != "True" or degraded.reason != "ApplyFailed":
            return ""
        # One failed request of a long update, or of one that was held, is not late.
        since = max(parse_time(before.start_time), parse_time(degraded.last_transition_time))
        return describe(degraded) if self.now.timestamp() > since + self.service.spec.rollout.progress_deadline_seconds else ""

    def _runs(self, images: Images) -> bool:
        """Return whether all pods run these images, and serve."""
        if self.live != with_own_images(self.service, self.observed, images):
            return False
        service, seen = self.service, self.observed.deployments
        workers = Replicas.of(seen.get(names.WORKER), service.spec.desired_replicas)
        routers = Replicas.of(seen.get(names.ROUTER), router_replicas(service, seen.get(names.ROUTER)))
        ready = self.health.ready
        proven = ready is not None and ready.status == "True" and ready.observed_generation == service.generation
        return workers.complete and routers.complete and (proven or not service.spec.desired_replicas)

    def _status(self, phase: UpdatePhase, **fields: object) -> ImageUpdateStatus:
        return ImageUpdateStatus.model_validate(
            {"phase": phase, "worker_image": self.newest.worker, "router_image": self.newest.router, **fields}
        )

    def _now(self) -> str:
        return format_time(self.now)


def _changes(deployments: Iterable[Body]) -> Iterable[str | None]:
    """Return the times of the Deployments' last reported changes."""
    conditions = (one for body in deployments for one in conditions_of(body).values())
    return (one.get("lastUpdateTime") or one.get("lastTransitionTime") for one in conditions)
