"""The loop of one service: wait, read the store, compute `desired`, apply, say what is seen. Nothing that matters is remembered."""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fairlead_operator.api import InferenceService, InvalidManifest, ServiceStatus
from fairlead_operator.causes import Cause
from fairlead_operator.children import redis
from fairlead_operator.desired import Desired, desired
from fairlead_operator.kube.cache import Owner, Store
from fairlead_operator.kube.client import ApiRefused, Cluster
from fairlead_operator.kube.kinds import OPTIONAL, REVISIONS, SERVICES
from fairlead_operator.kube.workqueue import Lanes
from fairlead_operator.objects import component_of
from fairlead_operator.observed import Decision, Observed, ProbeResult, RedisSeen
from fairlead_operator.polling import deletion_costs
from fairlead_operator.polling.canary import CanaryWatch
from fairlead_operator.polling.demand import DemandWatch
from fairlead_operator.polling.index import IndexWatch
from fairlead_operator.polling.loading import LoadingWatch
from fairlead_operator.polling.pod_events import PodEvents
from fairlead_operator.polling.prober import Asked, Prober
from fairlead_operator.process.metrics import Metrics
from fairlead_operator.reconcile.applier import Applier, ServiceGone
from fairlead_operator.rollout.node_room import Departures
from fairlead_operator.scaling.standing import standing
from fairlead_operator.settings import Settings
from fairlead_operator.status import groups as group_view
from fairlead_operator.status import refused_spec, transitions
from fairlead_operator.status.index import ready_routers, router_to_ask
from fairlead_operator.status.loading import pods_to_ask
from fairlead_operator.status.unsupported import unsupported

log = logging.getLogger(__name__)
SETTLE = 0.05  # seconds: a burst of events (three pods become ready) is one pass
_EXPOSED = {kind.kind for kind in OPTIONAL}
BACKOFF_FIRST, BACKOFF_LONGEST = 0.5, 60.0  # seconds between passes that fail
RETRY_REFUSED = 30.0  # seconds until something that the API server refused is tried again (a quota may have grown)
OVERTAKEN = 0.5  # seconds
_LOOKED_AT = {"Deployment", "Pod", REVISIONS.kind, *_EXPOSED}


class Overtaken(Exception):
    """The service was written by somebody else since it was read: what was computed is of the past."""


Announce = Callable[[Mapping[str, Any], str, str, str], None]  # service, type (Normal|Warning), reason, message


@dataclass(frozen=True)
class Tools:
    """What all loops share."""

    cluster: Cluster
    store: Store
    prober: Prober
    settings: Settings
    announce: Announce
    lanes: Lanes  # how many passes may write at the same time
    served: Callable[[], frozenset[str]] = frozenset  # the optional kinds that this cluster has
    unsure: Callable[[], frozenset[str]] = frozenset  # those of which that is not known
    metrics: Metrics = field(default_factory=Metrics)
    redis: Callable[[], RedisSeen | None] = lambda: None  # with which credentials services reach the index


class Loop:
    """One service by namespace and name. `wake()` from anywhere in the event loop; `run()` ends when the service is gone."""

    def __init__(self, owner: Owner, tools: Tools) -> None:
        self._owner = owner
        self._tools = tools
        self._woken = asyncio.Event()
        self._applier: Applier | None = None
        self._probe: ProbeResult | None = None
        self._probing: asyncio.Task[None] | None = None
        self._index = IndexWatch(tools.prober, self.wake)
        self._pod_events = PodEvents(tools.cluster, self.wake)
        self._canary = CanaryWatch(tools.prober, self.wake)
        self._departures = Departures(time.time())
        self._loading = LoadingWatch(tools.prober, self.wake)
        self._demand = DemandWatch(tools.prober, self.wake)
        self._decision: Decision | None = None

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        failures = 0
        wait: float | None = 0.0
        try:
            while True:
                await self._sleep(wait)
                try:
                    async with self._tools.metrics.one_pass(self._tools.lanes, urgent=self._edited()):
                        wait = await self.one_pass()
                    failures = 0
                except ServiceGone:
                    return
                except Overtaken:
                    wait = OVERTAKEN  # the watch is about to show what the pass had not seen
                except Exception as error:
                    failures += 1
                    self._tools.metrics.failed(error)
                    wait = min(BACKOFF_FIRST * 2.0 ** min(failures, 10), BACKOFF_LONGEST) * random.uniform(0.8, 1.2)
                    level = logging.DEBUG if isinstance(error, ApiRefused) and error.code == 409 else logging.WARNING
                    log.log(level, "%s/%s: pass failed, again in %.1f s: %s: %s", *self._owner, wait, type(error).__name__, error)
                    self._woken.clear()
                    await self._sleep(wait)
                    wait = 0.0
        finally:
            self._stop_asking()

    async def _sleep(self, wait: float | None) -> None:
        """Until woken, or for `wait` seconds (None: only until woken); then let a burst of events settle."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await self._woken.wait()
        await asyncio.sleep(SETTLE)
        self._woken.clear()

    def _edited(self) -> bool:
        """The status does not speak of the present spec yet: somebody is waiting for this pass."""
        body = self._tools.store.service(self._owner)
        return body is not None and (body.get("status") or {}).get("observedGeneration") != body["metadata"]["generation"]

    async def one_pass(self) -> float | None:
        """Bring the cluster one step nearer. Returns the seconds until it is worth looking again; None: when something changes."""
        body = self._tools.store.service(self._owner)
        if body is None or body["metadata"].get("deletionTimestamp"):
            raise ServiceGone(f"{self._owner[0]}/{self._owner[1]}")
        applier = self._applier_of(body["metadata"]["uid"])
        try:
            service = InferenceService.parse(body)
        except InvalidManifest as error:
            # Accepted by another version's CRD. Say it; whatever runs stays as it is.
            unread = InferenceService.parse({**body, "spec": {"model": {"uri": "file:///unread"}}})
            return await self._stay(body, unread, Cause("InvalidSpec", str(error), fault=True))
        if problem := unsupported(service, self._tools.served(), self._tools.unsure()):
            return await self._stay(body, service, Cause(*problem, fault=True))
        before, observed = self._tools.store.versions(self._owner), self._observed(service)
        plan = desired(service, observed, self._tools.settings, datetime.now(UTC))
        self._decision = plan.decision or self._decision
        if deletion_costs.fewer(plan.objects, observed):
            for pod in await deletion_costs.weigh(self._tools.cluster, self._tools.prober.demand, observed):
                self._tools.store.put(pod)
        # A route is made when its pool can be; where that is not known, the one that leads here stays.
        refusals = await applier.converge(plan.objects, keep=_EXPOSED if self._tools.unsure() else ())
        if refusals or self._tools.store.versions(self._owner) != before:  # the status speaks of what is there now
            observed = self._observed(service, refusals)
            plan = desired(service, observed, self._tools.settings, datetime.now(UTC))
        if not plan.servable:
            self._probe = None
            self._stop_probing()
        elif plan.probe_due:
            self._start_probing(service, router_to_ask(observed.pods))
        pods = observed.pods
        trial = plan.status.canary
        judged = trial is not None and trial.phase in ("Judging", "Paused")
        self._canary.follow(ready_routers(pods) if judged else (), plan.split)
        self._ask_of(observed, plan.status)
        self._demand.follow(ready_routers(pods), standing(service, observed, plan.status.revision.rpartition("-")[2]))
        await self._write_status(body, service.status, plan.status)
        return self._next_look(plan, refused=bool(refusals))

    async def _stay(self, body: Mapping[str, Any], service: InferenceService, problem: Cause) -> float | None:
        """A spec that is not followed: what runs stays as it is, and is told of."""
        self._probe = None
        self._stop_probing()
        self._canary.stop()
        self._demand.stop()
        observed = self._observed(service)
        if self._applier is not None and observed.deployments:  # a rotation does not wait for a better spec
            await self._applier.write_secrets(redis.objects(service, self._tools.settings, observed.redis))
        status, wake_at = refused_spec.said(service, problem, observed, datetime.now(UTC))
        self._ask_of(observed, status)
        await self._write_status(body, service.status, status)
        return None if wake_at is None else max(0.1, wake_at - time.time())

    def _ask_of(self, observed: Observed, status: ServiceStatus) -> None:
        """What the status says of routers and pods, they are asked for."""
        self._index.follow(router_to_ask(observed.pods), known=status.index is not None)
        self._loading.follow(pods_to_ask(observed.stable.pods))
        self._pod_events.follow(observed.pods)

    def _next_look(self, plan: Desired, *, refused: bool) -> float | None:
        looks = [plan.wake_at - time.time()] if plan.wake_at is not None and self._probing is None else []
        if refused:
            looks.append(RETRY_REFUSED)
        return max(0.1, min(looks)) if looks else None

    def _applier_of(self, uid: str) -> Applier:
        """A service deleted and made again under its name is another service."""
        if self._applier is None or self._applier.uid != uid:
            self._applier = Applier(self._tools.cluster, self._tools.store, *self._owner, uid)
            self._probe = self._decision = None
            self._stop_asking()
        return self._applier

    def _stop_asking(self) -> None:
        """Nobody is asked anything for this service any more, until a pass finds reason to."""
        self._stop_probing()
        for watch in (self._index, self._pod_events, self._canary, self._loading, self._demand):
            watch.stop()

    def _observed(self, service: InferenceService, refusals: Mapping[str, str] | None = None) -> Observed:
        children = self._tools.store.children(self._owner, _LOOKED_AT)
        pods = tuple(body for key, body in children.items() if key[0] == "Pod")
        observed = Observed(
            deployments={component_of(body): body for key, body in children.items() if key[0] == "Deployment"},
            pods=pods,
            revisions=tuple(body for key, body in children.items() if key[0] == REVISIONS.kind),
            refusals=refusals or {},
            probe=self._probe,
            index=self._index.seen,
            redis=self._tools.redis(),
            served=self._tools.served(),
            exposed={key[0]: body for key, body in children.items() if key[0] in _EXPOSED},
            traffic=self._index.traffic,
            pod_events=self._pod_events.seen,
            canary=self._canary.seen,
            quiet_since=self._departures.since(pods, time.time()),
            loading=self._loading.seen,
            needs=self._demand.needs,
            contests=self._applier.contests.standing() if self._applier is not None else (),
            decision=self._decision,
        )
        return group_view.seen(service, observed, datetime.now(UTC))

    def _start_probing(self, service: InferenceService, router: str) -> None:
        if self._probing is None:
            self._probing = asyncio.create_task(
                self._ask(Asked.of(service, router), service.generation), name=f"probe {service.namespace}/{service.name}"
            )

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    async def _ask(self, asked: Asked, generation: int) -> None:
        try:
            problem = await self._tools.prober.complete(asked)
        except Exception as error:  # whatever it is: a request without an end would keep the service from ever being asked again
            problem = f"{type(error).__name__}: {error}"
        self._tools.metrics.probed(problem)
        before = self._probe.attempts if self._probe is not None and self._probe.generation == generation else 0
        self._probe = ProbeResult(generation, not problem, problem, before + 1 if problem else 0, time.time())
        self._probing = None
        self._index.hurry()  # before its first request a router may not have asked the index at all
        self.wake()

    async def _write_status(self, body: Mapping[str, Any], before: ServiceStatus, after: ServiceStatus) -> None:
        if body.get("status") == after.model_dump(mode="json", by_alias=True, exclude_none=True):
            return
        status = after.model_dump(mode="json", by_alias=True)  # null removes a field
        gone = {key: None for key in body.get("status") or {} if key not in status}
        try:
            answer = await self._tools.cluster.patch_status(body, {**status, **gone})
        except ApiRefused as refusal:
            if refusal.code == 404:
                fresh = await self._tools.cluster.get(SERVICES, *self._owner)
                if fresh is None:
                    self._tools.store.remove(body)
                    raise ServiceGone(str(refusal)) from None
            if refusal.code == 409:
                raise Overtaken(str(refusal)) from None
            raise
        self._tools.store.put(answer)
        for type_, reason, message in transitions.said(before, after):
            self._tools.announce(body, type_, reason, message)
