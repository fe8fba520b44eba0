"""Measurements of the operator. Each returns figures by name."""

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from tests.operator.support.apiserver import ApiServer, program
from tests.operator.support.manifests import manifest

from bench.operator.api import DEPLOYMENTS, SERVICES, Api
from bench.operator.operator_process import Operator

Figures = dict[str, float]
CRD = Path("crds/fairlead.dev_inferenceservices.yaml")
WORKERS = 3  # of each service; with two routers, five pods
DEADLINE = 60.0  # seconds for one edit; far beyond the bar
PAUSE = (0.02, 0.1)  # seconds between two edits: one at a time, on an otherwise steady system


def service(number: int) -> dict[str, Any]:
    """Return a manifest as users write them."""
    return manifest(f"s{number:04}", replicas=WORKERS, resources={"cpu": "4", "memory": "32Gi", "gpus": 1})


def writes(server: ApiServer, user: str) -> list[dict[str, Any]]:
    """Return the operator's writes, without those of its lease."""
    return [event for event in server.writes(user) if event["objectRef"]["resource"] != "leases"]


async def quiet(server: ApiServer, operator: Operator, seconds: float = 5.0) -> None:
    """Wait until nothing was written for some seconds: probes and rollouts of the last edits are over."""
    before = -1
    while before != (now := len(writes(server, operator.user))):
        before = now
        await asyncio.sleep(seconds)


class Deployments:
    """A watch of all worker Deployments, by which an edit is seen in the child object."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}
        self._changed = asyncio.Condition()

    @classmethod
    @asynccontextmanager
    async def watched(cls, api: Api) -> AsyncIterator["Deployments"]:
        made = cls()
        listed = await api.list(DEPLOYMENTS)
        task = asyncio.create_task(made._follow(api, listed["metadata"]["resourceVersion"]))
        try:
            yield made
        finally:
            task.cancel()

    async def _follow(self, api: Api, version: str) -> None:
        async for _, body in api.watch(DEPLOYMENTS, version):
            async with self._changed:
                self._seen[body["metadata"]["name"]] = body
                self._changed.notify_all()

    async def has(self, name: str, path: str, value: Any) -> None:
        """Wait until the dotted `path` of this Deployment is `value`."""

        def there() -> bool:
            found: Any = self._seen.get(name)
            for key in path.split("."):
                found = (found or {}).get(key)
            return bool(found == value)

        async with asyncio.timeout(DEADLINE), self._changed:
            await self._changed.wait_for(there)


async def edits(api: Api, services: int, count: int, first: int) -> Figures:
    """Return the milliseconds from the answer to an edit of a service until a watch shows its Deployment's new content."""
    took: dict[str, list[float]] = {"scale": [], "deadline": []}
    choose = random.Random(first)
    async with Deployments.watched(api) as seen:
        for number in range(count):
            name = f"s{choose.randrange(services):04}"
            before = (await api.request("GET", f"{SERVICES}/{name}"))["spec"]
            kind = "deadline" if number % 2 else "scale"
            if kind == "scale":
                wanted: Any = WORKERS + 1 if before["replicas"] == WORKERS else WORKERS
                patch: Any = {"replicas": wanted}
                path = "spec.replicas"
            else:
                wanted = first + number
                patch = {"rollout": {"progressDeadlineSeconds": wanted}}
                path = "spec.progressDeadlineSeconds"
            await api.patch(f"{SERVICES}/{name}", {"spec": patch})
            began = time.monotonic()
            await seen.has(f"{name}-worker", path, wanted)
            took[kind].append(1000 * (time.monotonic() - began))
            await asyncio.sleep(choose.uniform(*PAUSE))
    every = sorted(took["scale"] + took["deadline"])
    return {"p50_ms": median(every), "p99_ms": every[min(len(every) - 1, int(0.99 * len(every)))], "max_ms": every[-1]}


async def all_ready(api: Api, services: int, tell: Any) -> None:
    """Wait until every service is Ready."""
    while True:
        ready = 0
        for body in (await api.request("GET", SERVICES))["items"]:
            conditions = (body.get("status") or {}).get("conditions", [])
            current = (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
            ready += current and any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        tell(f"{ready} of {services} services are ready")
        if ready >= services:
            return
        await asyncio.sleep(3)


async def idle(server: ApiServer, operator: Operator, seconds: float) -> Figures:
    """Return the writes (without the lease's) and the CPU time while nothing changes."""
    before, cpu = len(writes(server, operator.user)), operator.cpu
    await asyncio.sleep(seconds)
    return {"writes": len(writes(server, operator.user)) - before, "cpu_percent": 100 * (operator.cpu - cpu) / seconds}


async def cold_start(api: Api, server: ApiServer, services: int, start: Any) -> tuple[Operator, Figures]:
    """Start an operator on an existing fleet. Edits made before its start show when each service was reconciled."""
    chosen = range(services - 1, -1, -max(1, services // 10))
    async with Deployments.watched(api) as seen:
        for number in chosen:
            await api.patch(f"{SERVICES}/s{number:04}", {"spec": {"rollout": {"progressDeadlineSeconds": 777}}})
        operator: Operator = start()
        cpu = operator.cpu
        await asyncio.gather(*(seen.has(f"s{number:04}-worker", "spec.progressDeadlineSeconds", 777) for number in chosen))
        edited = time.monotonic() - operator.began
    steady = max(edited, await operator.settled())
    spent = operator.cpu - cpu
    edited_names = tuple(f"s{number:04}" for number in chosen)
    made = [event["objectRef"] for event in writes(server, operator.user) if event["objectRef"]["resource"] != "events"]
    beside = sum(not reference["name"].startswith(edited_names) for reference in made)
    resident, most = operator.resident
    figures = {"edits_applied_s": edited, "steady_s": steady, "cpu_s": spent, "writes_beside_the_edits": beside}
    return operator, {**figures, "resident_mib": resident, "most_resident_mib": most}


async def failover(api: Api, server: ApiServer, leader: Operator, other: Operator, services: int) -> Figures:
    """Kill the leader with -9 and edit a service. Return the seconds until the other applied it, and whether both ever wrote."""
    name = f"s{services // 2:04}"
    earlier = len(writes(server, other.user))  # of a process that had led before, under this name
    leader.process.kill()
    leader.process.wait()
    began = time.monotonic()
    async with Deployments.watched(api) as seen:
        await api.patch(f"{SERVICES}/{name}", {"spec": {"rollout": {"progressDeadlineSeconds": 888}}})
        await seen.has(f"{name}-worker", "spec.progressDeadlineSeconds", 888)
    took = time.monotonic() - began
    last = max((event["requestReceivedTimestamp"] for event in server.writes(leader.user)), default="")
    first = min(event["requestReceivedTimestamp"] for event in writes(server, other.user)[earlier:])
    return {"acts_after_s": took, "both_acted": float(first <= last)}


def sizes(server: ApiServer) -> Figures:
    """Return the bytes of the CRD and of all that the chart renders. Apply the CRD client-side, as users do."""
    applied = server.kubectl("apply", "-f", str(CRD))
    if applied.returncode:
        raise SystemExit(f"kubectl apply of {CRD}: {applied.stderr}")
    helm = program("helm")
    if helm is None:
        raise SystemExit("helm not found: run `make kubernetes` once")
    rendered = subprocess.run([str(helm), "template", "fl", "charts/fairlead"], capture_output=True, check=True).stdout
    return {"crd_kb": CRD.stat().st_size / 1000, "chart_kb": len(rendered) / 1000}
