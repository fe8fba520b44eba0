"""The reconciler of one service: wait, read the cache, compute `desired`, apply it, write the status.

Every decision is computed from the cluster. A restarted operator loses nothing that matters.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fairlead_common.telemetry.tracer import Tracer
from fairlead_operator.api import InferenceService, InvalidManifest, ServiceStatus
from fairlead_operator.causes import Cause
from fairlead_operator.children import redis
from fairlead_operator.desired import Desired, desired
from fairlead_operator.kube.cache import Cache, Owner
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import OPTIONAL, REVISIONS, SERVICES
from fairlead_operator.kube.tracing import trace_part, trace_reconcile
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.objects import component_of
from fairlead_operator.observed import ModelCommit, Observed, ObservedRedis, OtherService, ProbeResult, SizeDecision
from fairlead_operator.polling import deletion_costs
from fairlead_operator.polling.canary import CanaryPoller
from fairlead_operator.polling.demand import DemandPoller
from fairlead_operator.polling.errors import ErrorPoller
from fairlead_operator.polling.hub import HubResolver
from fairlead_operator.polling.index import IndexPoller
from fairlead_operator.polling.loading import LoadingPoller
from fairlead_operator.polling.pod_events import PodEventPoller
from fairlead_operator.polling.prober import Prober, ProbeTarget
from fairlead_operator.process.metrics import Metrics
from fairlead_operator.profiles import ProfileNotFound, merge_profile, parse_service, profile_name
from fairlead_operator.reconcile.applier import Applier, ServiceGone
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.rollout.images import UPDATING
from fairlead_operator.rollout.model_commit import find_hub_model, find_unresolved
from fairlead_operator.rollout.node_capacity import DepartureTracker
from fairlead_operator.scaling.state import scaling_state
from fairlead_operator.settings import Settings
from fairlead_operator.status import groups as group_view
from fairlead_operator.status import refused_spec, transitions
from fairlead_operator.status.index import choose_router, ready_routers
from fairlead_operator.status.loading import pods_to_poll
from fairlead_operator.status.unsupported import find_unsupported

log = logging.getLogger(__name__)
DEBOUNCE = 0.05  # seconds: a burst of events (three pods become ready) leads to one reconcile
_OPTIONAL_KINDS = {kind.kind for kind in OPTIONAL}
BACKOFF_FIRST, BACKOFF_LONGEST = 0.5, 60.0  # seconds between reconciles that fail
RETRY_REFUSED = 30.0  # seconds until an object that the API server refused is applied again (a quota may have grown)
CONFLICT_DELAY = 0.5  # seconds
_OBSERVED_KINDS = {"Deployment", "Job", "Pod", REVISIONS.kind, *_OPTIONAL_KINDS}


class Conflict(Exception):
    """Another writer changed the service after it was read: the computed status is out of date."""


RecordEvent = Callable[[Mapping[str, Any], str, str, str], None]  # service, type (Normal|Warning), reason, message


@dataclass(frozen=True)
class Dependencies:
    """Dependencies that all reconcilers share."""

    cluster: Cluster
    cache: Cache
    prober: Prober
    settings: Settings
    record_event: RecordEvent
    work_queue: WorkQueue  # bounds the number of concurrent reconciles
    fleet: FleetRollout
    hub: HubResolver
    served: Callable[[], frozenset[str]] = frozenset  # the optional kinds that this cluster serves
    unknown: Callable[[], frozenset[str]] = frozenset  # optional kinds for which no answer has come yet
    metrics: Metrics = field(default_factory=Metrics)
    gateway: Callable[[str, str], Mapping[str, Any] | None] = lambda namespace, name: None  # spec and status of a Gateway; None: unknown
    redis: Callable[[], ObservedRedis | None] = lambda: None  # the credentials with which services reach the index
    tracer: Tracer | None = None


class Reconciler:
    """Reconciles one service. `wake()` may be called anywhere in the event loop. `run()` returns when the service is gone."""

    def __init__(self, owner: Owner, dependencies: Dependencies) -> None:
        self._owner = owner
        self._dependencies = dependencies
        self._wake_event = asyncio.Event()
        self._applier: Applier | None = None
        self._probe: ProbeResult | None = None
        self._probe_task: asyncio.Task[None] | None = None
        self._index = IndexPoller(dependencies.prober, self.wake)
        self._pod_events = PodEventPoller(dependencies.cluster, self.wake)
        self._canary = CanaryPoller(dependencies.prober, self.wake)
        self._departures = DepartureTracker(time.time())
        self._loading = LoadingPoller(dependencies.prober, self.wake)
        self._demand = DemandPoller(dependencies.prober, self.wake)
        self._errors = ErrorPoller(dependencies.prober, self.wake)
        self._decision: SizeDecision | None = None
        self._model_commit: ModelCommit | None = None

    def wake(self) -> None:
        self._wake_event.set()

    async def run(self) -> None:
        failures = 0
        wait: float | None = 0.0
        try:
            while True:
                await self._sleep(wait)
                try:
                    with trace_reconcile(self._dependencies.tracer, *self._owner, harmless=ServiceGone):
                        async with self._dependencies.metrics.measure_reconcile(
                            self._dependencies.work_queue, urgent=self._has_unobserved_edit()
                        ):
                            wait = await self.reconcile()
                    failures = 0
                except ServiceGone:
                    self._dependencies.fleet.forget(self._owner)
                    return
                except Conflict:
                    wait = CONFLICT_DELAY  # the watch is about to deliver the version that this reconcile had not seen
                except Exception as error:
                    failures += 1
                    self._dependencies.metrics.count_error(error)
                    wait = min(BACKOFF_FIRST * 2.0 ** min(failures, 10), BACKOFF_LONGEST) * random.uniform(0.8, 1.2)
                    level = logging.DEBUG if isinstance(error, ApiError) and error.code == 409 else logging.WARNING
                    log.log(level, "%s/%s: reconcile failed, again in %.1f s: %s: %s", *self._owner, wait, type(error).__name__, error)
                    self._wake_event.clear()
                    await self._sleep(wait)
                    wait = 0.0
        finally:
            self._stop_polling()

    async def _sleep(self, wait: float | None) -> None:
        """Sleep until woken, or for `wait` seconds (None: only until woken). Then let a burst of events settle."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._wake_event.wait()
        await asyncio.sleep(DEBOUNCE)
        self._wake_event.clear()

    def _has_unobserved_edit(self) -> bool:
        """Return whether the status describes an older spec: a user is waiting for this reconcile."""
        body = self._dependencies.cache.service(self._owner)
        return body is not None and (body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"]

    async def reconcile(self) -> float | None:
        """Bring the cluster one step nearer to `desired`.

        Returns the seconds until the next reconcile, or None where only a change makes one due. Raises ServiceGone and Conflict.
        """
        body = self._dependencies.cache.service(self._owner)
        if body is None or body["metadata"].get("deletionTimestamp"):
            raise ServiceGone(f"{self._owner[0]}/{self._owner[1]}")
        applier = self._applier_for(body["metadata"]["uid"])
        try:
            service = parse_service(body, self._dependencies.cache.profile(self._owner[0], profile_name(body)))
        except InvalidManifest as error:
            # The CRD of another version accepted this spec, or engine.args has a flag of the operator, which the CRD does not check.
            # Report the error and leave the running children unchanged.
            unread = InferenceService.parse({**body, "spec": {"model": {"uri": "file:///unread"}}})
            reason = "ProfileNotFound" if isinstance(error, ProfileNotFound) else "InvalidSpec"
            return await self._keep_running(body, unread, Cause(reason, str(error), fault=True))
        if problem := find_unsupported(service, self._dependencies.served(), self._dependencies.unknown()):
            return await self._keep_running(body, service, Cause(*problem, fault=True))
        if self._model_commit is not None and self._model_commit.model != find_hub_model(service):
            self._model_commit = None  # the model was edited
        before, observed = self._dependencies.cache.versions(self._owner), self._observe(service)
        if (unresolved := find_unresolved(service, observed)) is not None:
            self._model_commit = self._dependencies.hub.commit(unresolved, self.wake)
            if self._model_commit is None:
                return None  # woken within seconds; until then nothing changes
            observed = replace(observed, model_commit=self._model_commit)
        plan = desired(service, observed, self._dependencies.settings, datetime.now(UTC))
        self._decision = plan.decision or self._decision
        if deletion_costs.scales_down(plan.objects, observed):
            demand = self._dependencies.prober.demand
            with self._dependencies.cache.read() as read:
                for pod in await deletion_costs.update_deletion_costs(self._dependencies.cluster, demand, observed):
                    read.put(pod)
        # The HTTPRoute is kept while it is unknown whether the cluster serves its InferencePool.
        with trace_part("apply") as span:
            refusals = await applier.converge(plan.objects, keep=_OPTIONAL_KINDS if self._dependencies.unknown() else ())
            span.set({"fairlead.objects": len(plan.objects), "fairlead.refused_objects": len(refusals)})
        if refusals or self._dependencies.cache.versions(self._owner) != before:  # the status describes the present objects
            observed = self._observe(service, refusals)
            plan = desired(service, observed, self._dependencies.settings, datetime.now(UTC))
        if not plan.servable:
            self._probe = None
            self._stop_probing()
        elif plan.probe_due:
            self._start_probing(service, choose_router(observed.pods))
        elif plan.probe_spent:
            self._probe = None
        pods = observed.pods
        canary_status = plan.status.canary
        is_analyzed = canary_status is not None and canary_status.phase in ("Analyzing", "Paused")
        self._canary.follow(ready_routers(pods) if is_analyzed else (), plan.split)
        self._follow_pollers(observed, plan.status)
        update = plan.status.image_update
        is_judged = observed.fleet.admitted or (update is not None and update.phase in UPDATING)
        self._errors.follow(ready_routers(pods), active=is_judged)
        revision = plan.status.revision.rpartition("-")[2]
        self._demand.follow(ready_routers(pods), scaling_state(service, observed, revision, plan.minimum))
        await self._write_status(body, service.status, plan.status)
        return self._next_reconcile(plan, refused=bool(refusals))

    async def _keep_running(self, body: Mapping[str, Any], service: InferenceService, problem: Cause) -> float | None:
        """Report a spec that cannot be followed, and leave the running children unchanged."""
        self._probe = None
        self._stop_probing()
        self._canary.stop()
        self._demand.stop()
        self._errors.stop()
        observed = self._observe(service)
        if self._applier is not None and observed.deployments:  # a rotation of credentials does not wait for a valid spec
            await self._applier.write_secrets(redis.objects(service, self._dependencies.settings, observed.redis))
        status, wake_at = refused_spec.build_status(service, problem, observed, datetime.now(UTC))
        self._follow_pollers(observed, status)
        await self._write_status(body, service.status, status)
        return None if wake_at is None else max(0.1, wake_at - time.time())

    def _follow_pollers(self, observed: Observed, status: ServiceStatus) -> None:
        """Poll the index, the loading progress and the pod events that the status reports."""
        self._index.follow(choose_router(observed.pods), known=status.index is not None)
        self._loading.follow(pods_to_poll(observed.stable.pods))
        self._pod_events.follow(observed.pods, observed.jobs)

    def _next_reconcile(self, plan: Desired, *, refused: bool) -> float | None:
        delays = [plan.wake_at - time.time()] if plan.wake_at is not None and self._probe_task is None else []
        if refused:
            delays.append(RETRY_REFUSED)
        return max(0.1, min(delays)) if delays else None

    def _applier_for(self, uid: str) -> Applier:
        """Return the applier of this uid: a service that was deleted and created again under its name is another service."""
        if self._applier is None or self._applier.uid != uid:
            self._applier = Applier(self._dependencies.cluster, self._dependencies.cache, *self._owner, uid)
            self._probe = self._decision = self._model_commit = None
            self._stop_polling()
        return self._applier

    def _stop_polling(self) -> None:
        """Stop all probes and pollers of this service until a reconcile starts them again."""
        self._stop_probing()
        for poller in (self._index, self._pod_events, self._canary, self._loading, self._demand, self._errors):
            poller.stop()

    def _observe(self, service: InferenceService, refusals: Mapping[str, str] | None = None) -> Observed:
        children = self._dependencies.cache.children(self._owner, _OBSERVED_KINDS)
        pods = tuple(body for key, body in children.items() if key[0] == "Pod")
        observed = Observed(
            deployments={component_of(body): body for key, body in children.items() if key[0] == "Deployment"},
            pods=pods,
            revisions=tuple(body for key, body in children.items() if key[0] == REVISIONS.kind),
            jobs=tuple(body for key, body in children.items() if key[0] == "Job"),
            refusals=refusals or {},
            probe=self._probe,
            index=self._index.seen,
            redis=self._dependencies.redis(),
            served=self._dependencies.served(),
            optional_objects={key[0]: body for key, body in children.items() if key[0] in _OPTIONAL_KINDS},
            other_services=self._find_other_services(service),
            gateway=self._find_gateway(service),
            traffic=self._index.traffic,
            fallbacks=self._index.fallbacks,
            pod_events=self._pod_events.seen,
            canary=self._canary.seen,
            last_departure_at=self._departures.since(pods, time.time()),
            loading=self._loading.seen,
            recommendations=self._demand.recommendations,
            field_conflicts=self._applier.field_conflicts.current() if self._applier is not None else (),
            decision=self._decision,
            fleet=self._dependencies.fleet.view(self._owner),
            errors=self._errors.seen,
            model_commit=self._model_commit,
        )
        return group_view.with_group_as_deployment(service, observed, datetime.now(UTC))

    def _find_other_services(self, service: InferenceService) -> dict[str, OtherService]:
        cache, namespace = self._dependencies.cache, service.namespace
        bodies = {name: cache.service((namespace, name)) for name in service.spec.exposure.other_services}
        return {
            name: OtherService.parse(merge_profile(body, cache.profile(namespace, profile_name(body))))
            for name, body in bodies.items()
            if body is not None
        }

    def _find_gateway(self, service: InferenceService) -> Mapping[str, Any] | None:
        if service.spec.exposure.gateway is None:
            return None
        reference = service.spec.exposure.gateway.parent_ref
        return self._dependencies.gateway(reference.namespace or service.namespace, reference.name)

    def _start_probing(self, service: InferenceService, router: str) -> None:
        if self._probe_task is None:
            self._probe_task = asyncio.create_task(
                self._probe_once(ProbeTarget.of(service, router), service.generation), name=f"probe {service.namespace}/{service.name}"
            )

    def _stop_probing(self) -> None:
        if self._probe_task is not None:
            self._probe_task.cancel()
            self._probe_task = None

    async def _probe_once(self, target: ProbeTarget, generation: int) -> None:
        try:
            problem = await self._dependencies.prober.complete(target)
        except Exception as error:  # any error: an unfinished probe would block all later probes of this service
            problem = f"{type(error).__name__}: {error}"
        self._dependencies.metrics.count_probe(problem)
        before = self._probe.attempts if self._probe is not None and self._probe.generation == generation else 0
        self._probe = ProbeResult(generation, not problem, problem, before + 1 if problem else 0, time.time())
        self._probe_task = None
        self._index.poll_soon()  # a router may not have used the index before its first request
        self.wake()

    async def _write_status(self, body: Mapping[str, Any], before: ServiceStatus, after: ServiceStatus) -> None:
        if body.get("status") == after.model_dump(mode="json", by_alias=True, exclude_none=True):
            self._dependencies.fleet.report(self._owner, after)
            return
        status = after.model_dump(mode="json", by_alias=True)  # null removes a field
        gone = {key: None for key in body.get("status") or {} if key not in status}
        try:
            with self._dependencies.cache.read() as read:
                read.put(await self._dependencies.cluster.patch_status(body, {**status, **gone}))
        except ApiError as refusal:
            if refusal.code == 404:
                fresh = await self._dependencies.cluster.get(SERVICES, *self._owner)
                if fresh is None:
                    self._dependencies.cache.remove_missing(body)
                    raise ServiceGone(str(refusal)) from None
            if refusal.code == 409:
                raise Conflict(str(refusal)) from None
            raise
        self._dependencies.fleet.report(self._owner, after)
        for type_, reason, message in transitions.events_for(before, after):
            self._dependencies.record_event(body, type_, reason, message)
