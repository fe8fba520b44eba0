"""The planner of waves in the process: it lists the services before its first plan, and gives back what was not begun."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.operator.reconcile.test_reconciler import dependencies
from tests.operator.support.manifests import manifest

from fairlead_operator.api import ServiceStatus
from fairlead_operator.kube.cache import Cache, Owner
from fairlead_operator.kube.client import ApiError, Cluster
from fairlead_operator.kube.kinds import Kind
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.reconcile.reconciler import Reconciler
from fairlead_operator.settings import WaveLimits

_VERSIONS = itertools.count(1)


def body(name: str, phase: str = "", **more: Any) -> dict[str, Any]:
    made = manifest(name)
    made["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": str(next(_VERSIONS)), "generation": 1}
    return made | ({"status": status(phase, **more).model_dump(mode="json", by_alias=True, exclude_none=True)} if phase else {})


def status(phase: str, **more: Any) -> ServiceStatus:
    return ServiceStatus.model_validate({"imageUpdate": {"phase": phase, **more}})


class Listing:
    """An API server that lists these services, after it has refused once."""

    def __init__(self, *services: dict[str, Any], code: int = 503) -> None:
        self._services, self.code, self.refused = services, code, False

    async def pages(self, kind: Kind, namespace: str = "", *, labelled: bool = True) -> AsyncGenerator[tuple[list[Any], int], None]:
        if not self.refused:
            self.refused = True
            raise ApiError(self.code, "away")
        yield list(self._services), next(_VERSIONS)


@pytest.mark.parametrize("code", [503, 404])  # 404: the kind is not served yet
async def test_updates_under_way_that_no_watch_has_delivered_are_counted(monkeypatch: Any, code: int) -> None:
    monkeypatch.setattr("fairlead_operator.reconcile.fleet.RETRY", 0.01)
    woken: list[Owner] = []
    cache = Cache(lambda owner: None)
    cache.put(body("waits", "Waiting"))
    fleet = FleetRollout(WaveLimits(max_services=2), cache, woken.append)
    api = Listing(*(body(name, "RollingOut") for name in ("a", "b")), body("waits", "Waiting"), code=code)
    task = asyncio.create_task(fleet.run(cast(Cluster, api), ("",)))
    fleet.report(("default", "waits"), status("Waiting"))
    async with asyncio.timeout(60):
        while len(fleet.members) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not fleet.view(("default", "waits")).admitted, "both places are taken"
    woken.clear()
    fleet.report(("default", "a"), status("Current"))
    async with asyncio.timeout(60):
        while not woken:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert woken == [("default", "waits")] and fleet.view(("default", "waits")).admitted
    task.cancel()


@pytest.mark.parametrize("is_going", [False, True])  # True: its finalizers, or its children, keep it listed
@pytest.mark.parametrize("phase", ["Failed", "RollingOut"])
async def test_a_deleted_service_stops_nobody_and_takes_no_place(phase: str, is_going: bool) -> None:
    gone, waits = ("default", "gone"), ("default", "waits")
    woken: list[Owner] = []
    cache = Cache(lambda owner: None)
    bodies = body("gone", phase), body("waits", "Waiting")
    for one in bodies:
        cache.put(one)
    fleet = FleetRollout(WaveLimits(max_services=1), cache, woken.append)
    api = Listing(*bodies)
    api.refused = True
    task = asyncio.create_task(fleet.run(cast(Cluster, api), ("",)))
    for owner, one in ((gone, phase), (waits, "Waiting")):
        fleet.report(owner, status(one))
    async with asyncio.timeout(60):
        while fleet.stopped is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not fleet.view(waits).admitted
    if is_going:
        going = body("gone", phase)
        going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cache.put(going)
    else:
        cache.remove(bodies[0])
    await Reconciler(gone, replace(dependencies(cache, api), fleet=fleet)).run()
    async with asyncio.timeout(10):
        while not fleet.view(waits).admitted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert waits in woken
    task.cancel()


def test_an_admission_ends_when_the_service_begins_or_can_no_longer_begin_or_is_deleted() -> None:
    cache = Cache(lambda owner: None)
    names = ("a", "b", "c", "d")
    for name in names:
        cache.put(body(name, "Waiting"))
    fleet = FleetRollout(WaveLimits(max_services=3), cache, lambda owner: None)
    fleet.plan()
    assert [fleet.view(("default", name)).admitted for name in names] == [True, True, True, False]
    fleet.report(("default", "a"), status("RollingOut"))
    fleet.report(("default", "b"), status("Waiting", message="the service is not updated while it has a fault"))
    cache.remove(body("c"))
    fleet.plan()
    assert [fleet.view(("default", name)).admitted for name in names] == [False, False, False, True]


def test_a_failure_stops_waves_and_its_end_continues_them() -> None:
    cache, woken = Cache(lambda owner: None), []
    for name in ("a", "b"):
        cache.put(body(name, "Waiting"))
    fleet = FleetRollout(WaveLimits(max_services=2), cache, woken.append)
    fleet.plan()
    fleet.report(("default", "a"), status("RollingBack"))
    fleet.plan()
    view = fleet.view(("default", "b"))
    assert not view.admitted and view.stopped is not None and "kubectl fairlead outdated -A says where" in view.stopped
    assert ("default", "b") in woken
    fleet.report(("default", "a"), status("Waiting"))
    fleet.plan()
    assert fleet.view(("default", "b")).admitted and fleet.view(("default", "b")).stopped == ""
