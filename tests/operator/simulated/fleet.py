"""Many services on one simulated cluster, one operator that may be killed at any of its writes, and what all of them together use."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from tests.operator.simulated.api import Api, Body
from tests.operator.simulated.deployments import Controller, ReplicaSet, available
from tests.operator.simulated.nodes import Nodes
from tests.operator.simulated.operator import Operator
from tests.operator.support.manifests import SETTINGS, manifest

from fairlead_operator.kube.cache import Cache, Owner
from fairlead_operator.kube.client import ApiError
from fairlead_operator.observed import ObservedErrors
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.settings import WaveLimits

INSTANCE = "app.kubernetes.io/instance"


class Killed(BaseException):
    """The operator ends at one of its writes, as by kill -9."""


class FleetApi(Api):
    """Kills the operator at the write with number `kill_at`: before the API has it, or after, so that the answer is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.kill_at, self.kill_before = -1, False
        self.observe: Callable[[str, Body], None] = lambda event, body: None  # as a client, without copies
        self.refuse: Callable[[Mapping[str, Any]], str] = lambda body: ""  # why an object is not accepted; empty: it is

    def _tell(self, event: str, body: Body) -> None:
        self.observe(event, body)
        super()._tell(event, body)

    async def apply(self, body: Mapping[str, Any]) -> Body:
        if words := self.refuse(body):
            self.refusals.add(words)
            raise ApiError(403, words)
        return await self._killable(super().apply, body)

    async def patch_status(self, body: Mapping[str, Any], status: Mapping[str, Any]) -> Body:
        return await self._killable(super().patch_status, body, status)

    async def delete(self, body: Mapping[str, Any]) -> None:
        await self._killable(super().delete, body)

    async def _killable(self, write: Callable[..., Any], *given: Any) -> Any:
        is_last = len(self.writes) == self.kill_at
        if is_last and self.kill_before:
            self.writes.append((self.now, "killed before", ("", "")))
            raise Killed
        answer = await write(*given)
        if is_last:
            raise Killed
        return answer


class _Process:
    """One process of the operator: a reconciler for each service, and the planner of waves."""

    def __init__(self, api: FleetApi, settings: Any, errors: Callable[[Owner], ObservedErrors]) -> None:
        self._api = api
        self.fleet = FleetRollout(settings.waves, cast(Cache, self), lambda owner: self.reconcilers[owner].wake())
        self.reconcilers: dict[Owner, Operator] = {}
        for body in api.of("InferenceService"):
            owner = ("default", body["metadata"]["name"])
            self.reconcilers[owner] = Operator(api, settings, owner, self.fleet)
            self.reconcilers[owner].errors = lambda owner=owner: errors(owner)
        for body in api.objects.values():
            self._tell("MODIFIED", body)
        api.clients.append(self._tell)

    def stop(self) -> None:
        self._api.clients.remove(self._tell)

    def step(self, chance: random.Random) -> None:
        due = [one for one in self.reconcilers.values() if one.is_due]
        chance.shuffle(due)
        for one in due:
            one.step(lagging=chance.random() < 0.2)
            if chance.random() < 0.3:
                self.fleet.plan()
        self.fleet.plan()

    def _tell(self, event: str, body: Body) -> None:
        metadata = body["metadata"]
        name = metadata["name"] if body["kind"] == "InferenceService" else (metadata.get("labels") or {}).get(INSTANCE)
        if (one := self.reconcilers.get(("default", str(name)))) is not None:
            one.told(event, body)

    # The part of Cache that the planner reads.
    def owners(self) -> list[Owner]:
        return list(self.reconcilers)

    def service(self, owner: Owner) -> Body | None:
        return self._api.objects.get(("InferenceService", owner[1]))


class Fleet:
    """`run` lets all actors act; `check` is called after each tick."""

    def __init__(self, chance: random.Random, gpus: int, limits: WaveLimits, *, tick: float = 2.0) -> None:
        self.chance, self.api, self.tick = chance, FleetApi(), tick
        self.nodes = Nodes(self.api, chance, [gpus], draining=10.0)
        self.controller = Controller(self.api, self.nodes.make_pod, self.nodes.end_pod)
        self.settings = replace(SETTINGS, waves=limits)
        self.errors: dict[Owner, ObservedErrors] = {}
        self.kills = 0
        self._process = self._start()
        self._sets: dict[str, list[ReplicaSet]] = {}  # Deployment → its ReplicaSets, of the first `_indexed` ones
        self._indexed = 0
        self._busy: dict[str, float] = {}  # Deployment → until when its controller looks at it
        self.api.observe = self._watch

    def create_all(self, specs: Mapping[str, dict[str, Any]]) -> None:
        for name, spec in specs.items():
            self.api.put(manifest(name, **spec))
        self.restart()

    def edit(self, name: str, **spec: Any) -> None:
        body = dict(self.api.objects["InferenceService", name])
        body["metadata"] = dict(body["metadata"])
        body["spec"] = {**body["spec"], **{key: {**body["spec"].get(key, {}), **value} for key, value in spec.items()}}
        self.api.put(body, spec_changed=True)

    def restart(self, **settings: Any) -> None:
        self._process.stop()
        self.settings = replace(self.settings, **settings)
        self._process = self._start()

    def _start(self) -> _Process:
        return _Process(self.api, self.settings, lambda owner: self.errors.get(owner, ObservedErrors(0, 0, 0.0)))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False, check: Callable[[], None] = lambda: None) -> None:
        end = self.api.now + seconds
        while self.api.now < end and not until():
            for name in sorted(name for name, at in self._busy.items() if at >= self.api.now):
                if ("Deployment", name) not in self.api.objects:
                    self._end_pods(name)
                    continue
                self.controller.sync_sets(name)
                self.controller.sync(name)
                self.controller.sync_sets(name)
            self.nodes.step()
            try:
                self._process.step(self.chance)
            except Killed:
                self.kills += 1
                self.restart()
            check()
            self.api.now += self.tick

    def _end_pods(self, deployment: str) -> None:
        """The Deployment is gone: the garbage collector ends its pods. Its ReplicaSets stay listed, because `pods` counts them."""
        for one in self.controller.sets:
            if one.deployment == deployment:
                one.replicas = 0
                for pod in self.controller.pods_of(one):
                    self.nodes.end_pod(pod)

    def _watch(self, event: str, body: Body) -> None:
        """A controller looks at a Deployment while something changes, and until its pods have been ready for minReadySeconds."""
        name = body["sim"].set.deployment if body["kind"] == "Pod" else body["metadata"]["name"]
        if body["kind"] in ("Pod", "Deployment"):
            self._busy[name] = self.api.now + 30.0

    def status(self, name: str) -> Body:
        status: Body = self.api.objects["InferenceService", name].get("status") or {}
        return status

    def update(self, name: str) -> Body:
        return self.status(name).get("imageUpdate") or {}

    def phases(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for body in self.api.of("InferenceService"):
            phase = ((body.get("status") or {}).get("imageUpdate") or {}).get("phase", "")
            counts[phase] = counts.get(phase, 0) + 1
        return counts

    def condition(self, name: str, type_: str) -> Body:
        return next((one for one in self.status(name).get("conditions", []) if one["type"] == type_), {})

    def pods(self, name: str, component: str = "worker") -> list[Body]:
        """Not those that terminate."""
        sets = self.controller.sets
        for one in sets[self._indexed :]:
            self._sets.setdefault(one.deployment, []).append(one)
        self._indexed = len(sets)
        return [
            pod for one in self._sets.get(f"{name}-{component}", []) if one.replicas or one.total for pod in self.controller.pods_of(one)
        ]

    def is_busy(self, name: str) -> bool:
        """Return whether a Deployment of the service has changed lately."""
        return any(self._busy.get(f"{name}-{component}", 0.0) >= self.api.now for component in ("worker", "router"))

    def serving(self, name: str) -> int:
        return sum(available(pod, 0.0, self.api.now) for pod in self.pods(name))

    def images(self, name: str, component: str = "worker") -> set[str]:
        return {pod["sim"].set.template["spec"]["containers"][0]["image"] for pod in self.pods(name, component)}
