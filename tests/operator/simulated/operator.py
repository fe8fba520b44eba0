"""The operator's own parts (store, applier, `desired`) on the simulated API: `Reconciler.reconcile` without its tasks and its clock."""

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from tests.operator.simulated.api import Api, Body

from fairlead_operator.api import InferenceService
from fairlead_operator.desired import Desired, desired
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import ApiError
from fairlead_operator.kube.kinds import REVISIONS
from fairlead_operator.objects import component_of
from fairlead_operator.observed import FleetView, Observed, ObservedCanary, ObservedErrors, ProbeResult
from fairlead_operator.reconcile.applier import Applier, ServiceGone
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.reconcile.reconciler import RETRY_REFUSED
from fairlead_operator.rollout.node_capacity import DepartureTracker
from fairlead_operator.settings import Settings

T = TypeVar("T")
OWNER = ("default", "qwen")


class Operator:
    """One process of the operator. Events wait in `inbox` until `step(lagging=False)`."""

    def __init__(self, api: Api, settings: Settings, owner: tuple[str, str] = OWNER, fleet: FleetRollout | None = None) -> None:
        """With `fleet`, this is the part for one service of many, whose events `told` gets."""
        self._api, self._settings, self._owner, self._fleet = api, settings, owner, fleet
        self._cache = Cache(lambda owner: self.wake())
        self._applier: Applier | None = None
        self._departures = DepartureTracker(api.now)
        self._woken = True
        self._wake_at: float | None = None
        self.inbox: list[tuple[str, Body]] = []
        self.errors: Callable[[], ObservedErrors | None] = ObservedErrors
        self.plan: Desired | None = None
        self.canary: Callable[[], ObservedCanary | None] = lambda: None  # what the routers would say
        if fleet is None:
            self.inbox += [("MODIFIED", body) for body in api.objects.values()]
            api.clients.append(self.told)

    def stop(self) -> None:
        self._api.clients.remove(self.told)

    @property
    def is_due(self) -> bool:
        return bool(self.inbox) or self._woken or (self._wake_at is not None and self._api.now >= self._wake_at)

    def step(self, *, lagging: bool = False) -> None:
        """Reconcile, if something has changed or a time has come."""
        if not lagging:
            for event, body in self.inbox:
                if body["kind"] != "ReplicaSet":
                    (self._cache.remove if event == "DELETED" else self._cache.put)(body)
            self.inbox.clear()
        if self._woken or (self._wake_at is not None and self._api.now >= self._wake_at):
            self._woken, self._wake_at = False, None
            try:
                self._pass()
            except ServiceGone:
                self._applier = None
            except ApiError:
                self._woken = True

    def told(self, event: str, body: Body) -> None:
        self.inbox.append((event, body))

    def wake(self) -> None:
        self._woken = True

    def _pass(self) -> None:
        body = self._cache.service(self._owner)
        if body is None:
            return
        service = InferenceService.parse(body)
        if self._applier is None or self._applier.uid != service.uid:
            cluster: Any = self._api
            self._applier = Applier(cluster, self._cache, *self._owner, service.uid)
        before, plan = self._cache.versions(self._owner), self._desired(service)
        refused = finished(self._applier.converge(plan.objects))
        expected = ("garbage collector", *self._api.refusals)
        assert all(any(part in words for part in expected) for words in refused.values()), refused
        if refused or self._cache.versions(self._owner) != before:
            plan = self._desired(service, refusals=refused)
        if plan.probe_due:
            plan = self._desired(service, ProbeResult(service.generation, True, "", 0, self._api.now), refused)
        self.plan, self._wake_at = plan, self._api.now + RETRY_REFUSED if refused else plan.wake_at
        if body.get("status") != plan.status.model_dump(mode="json", by_alias=True, exclude_none=True):
            self._cache.put(finished(self._api.patch_status(body, plan.status.model_dump(mode="json", by_alias=True))))
        if self._fleet is not None:
            self._fleet.report(self._owner, plan.status)

    def _desired(self, service: InferenceService, probe: ProbeResult | None = None, refusals: Mapping[str, str] | None = None) -> Desired:
        children = self._cache.children(self._owner)
        pods = tuple(body for key, body in children.items() if key[0] == "Pod")
        observed = Observed(
            deployments={component_of(body): body for key, body in children.items() if key[0] == "Deployment"},
            pods=pods,
            revisions=tuple(body for key, body in children.items() if key[0] == REVISIONS.kind),
            refusals=refusals or {},
            probe=probe,
            last_departure_at=self._departures.since(pods, self._api.now),
            canary=self.canary(),
            errors=self.errors(),
            fleet=self._fleet.view(self._owner) if self._fleet is not None else FleetView(),
        )
        return desired(service, observed, self._settings, datetime.fromtimestamp(self._api.now, UTC))


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("the simulated API never suspends")
