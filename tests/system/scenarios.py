"""Fault scenarios for a fleet under load, and what its clients may observe."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.servers.redis_server import RedisServer
from tests.system.load import SHAPES, Load, Report, Shape
from tests.system.node import Node
from tests.system.processes import Fleet
from tests.system.slow_redis import SlowWay


@dataclass(frozen=True)
class Times:
    """Durations in seconds. `silence` is the routers' --silence-timeout."""

    before: float = 0.3
    down: float = 0.8
    stopped: float = 4.0
    after: float = 0.3
    silence: float = 2.0
    rate: float = 16.0

    @property
    def patience(self) -> float:
        """Longer than the longest answer in the worst case, and far shorter than the routers' request timeout."""
        return 20 + 2 * self.silence + self.down

    @property
    def moved(self) -> float:
        """Time by which a request of a silent worker has started elsewhere: detection takes under 5 s, the rest is slack."""
        return 12.0


ROUTER_FLAGS = ("--drain-grace", "1", "--drain-timeout", "20")


@dataclass
class Scene:
    """A running fleet and its environment. A fault records what it affects."""

    fleet: Fleet
    load: Load
    times: Times
    redis: RedisServer | None = None
    way: SlowWay | None = None
    nodes: Sequence[Node] = ()
    hurt: set[str] = field(default_factory=set)
    """Pods and routers whose streams may be lost."""
    lost: int = 0
    """Streams that ran there when the fault happened."""

    async def busy_pod(self, streams: int = 2) -> str:
        """Return the pod with the most running streams, at least `streams`."""
        return await self._busiest("pod", streams)

    async def unharmed_pod(self, streams: int = 1) -> str:
        """Return a busy pod whose streams must not be lost."""
        pod = await self.busy_pod(streams)
        self.hurt.discard(pod)
        return pod

    async def busy_router(self, streams: int = 2) -> str:
        return await self._busiest("router", streams)

    async def _busiest(self, key: str, streams: int, only: str = "") -> str:
        async with asyncio.timeout(30):
            while True:
                counted = self.load.streams_at(key)
                if only:
                    counted = type(counted)({only: counted[only]})
                if counted and counted.most_common(1)[0][1] >= streams:
                    name, self.lost = counted.most_common(1)[0]
                    self.hurt.add(name)
                    return name
                await asyncio.sleep(0.01)

    async def busy(self, pod: str, streams: int = 2) -> None:
        """Wait until that pod has running streams."""
        await self._busiest("pod", streams, pod)


Fault = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    """`cuts`: running streams end with an error event (at least one must). `resets`: connections end with the router."""

    name: str
    fault: Fault
    cuts: bool = False
    resets: bool = False
    holds: bool = False
    """No worker can serve the requests for a while."""
    for_good: bool = False
    """The fleet stays incomplete afterwards."""


async def worker_killed(scene: Scene) -> None:
    worker = scene.fleet.worker(await scene.busy_pod())
    worker.kill()
    await asyncio.sleep(scene.times.down)
    worker.start()


async def worker_stopped(scene: Scene) -> None:
    worker = scene.fleet.worker(await scene.busy_pod())
    worker.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(scene.times.stopped)
    finally:
        worker.signal(signal.SIGCONT)


async def worker_terminated(scene: Scene) -> None:
    worker = scene.fleet.worker(await scene.unharmed_pod())
    worker.signal(signal.SIGTERM)
    status = await asyncio.to_thread(worker.wait, 30)
    assert status == 0, f"a draining worker ended with {status}"
    worker.start()


async def workers_all_killed(scene: Scene) -> None:
    await scene.busy_pod()
    for pod in scene.fleet.pods:
        scene.fleet.worker(pod).kill()
        scene.hurt.add(pod)
    await asyncio.sleep(scene.times.down)
    for pod in scene.fleet.pods:
        scene.fleet.worker(pod).start()


async def router_killed(scene: Scene) -> None:
    router = scene.fleet.routers[await scene.busy_router()]
    router.kill()
    await asyncio.sleep(scene.times.down)
    router.start()


async def router_terminated(scene: Scene) -> None:
    router = scene.fleet.routers[await scene.busy_router()]
    router.signal(signal.SIGTERM)
    status = await asyncio.to_thread(router.wait, 30)
    assert status == 0, f"a draining router ended with {status}"
    router.start()


async def redis_killed(scene: Scene) -> None:
    """Kill Redis and start it again without its data."""
    assert scene.redis is not None
    scene.redis.kill()
    await asyncio.sleep(scene.times.down)
    await asyncio.to_thread(scene.redis.start)


async def redis_stopped(scene: Scene) -> None:
    assert scene.redis is not None
    process = scene.redis.pid
    os.kill(process, signal.SIGSTOP)
    try:
        await asyncio.sleep(scene.times.down)
    finally:
        os.kill(process, signal.SIGCONT)


async def redis_wiped(scene: Scene) -> None:
    assert scene.redis is not None
    await asyncio.to_thread(scene.redis.client().flushall)
    await asyncio.sleep(scene.times.down)


async def redis_slow(scene: Scene) -> None:
    assert scene.way is not None
    scene.way.delay = 0.2
    await asyncio.sleep(scene.times.down)
    scene.way.delay = 0.0


async def nodes_vanish(scene: Scene) -> None:
    """Cut off the nodes: the first loses power, the others' packets are lost, so their kernels send nothing or nothing that arrives."""
    for node in scene.nodes:
        (pod,) = (pod for pod, address in scene.fleet.pods.items() if address.startswith(f"{node.address}:"))
        await scene.busy(pod)
    for node in scene.nodes:
        node.lose_power() if node is scene.nodes[0] else node.lose_answers()
    try:
        await asyncio.sleep(scene.times.stopped)
    finally:
        for node in scene.nodes:
            node.come_back()


SCENARIOS = (
    Scenario("worker kill -9", worker_killed, cuts=True),
    Scenario("worker SIGSTOP, then SIGCONT", worker_stopped, cuts=True),
    Scenario("worker SIGTERM", worker_terminated),
    Scenario("router kill -9", router_killed, resets=True),
    Scenario("router SIGTERM", router_terminated),
    Scenario("all workers kill -9", workers_all_killed, cuts=True, holds=True),
)
"""Scenarios on one fleet with an index. `holds`: clients of a stopped router wait for it."""
REDIS = (
    Scenario("redis kill -9, back empty", redis_killed),
    Scenario("redis SIGSTOP", redis_stopped),
    Scenario("redis FLUSHALL", redis_wiped),
)
"""Scenarios on the same fleet."""
SLOW = Scenario("redis answers 200 ms late", redis_slow)
NODES = Scenario("two of three nodes vanish without a FIN", nodes_vanish, cuts=True)
"""Scenarios on a fleet with workers on their own nodes and without an index, which those could not reach."""


def one_after_another(name: str, scenarios: Sequence[Scenario]) -> Scenario:
    """Combine scenarios with the same guarantees under one load."""

    async def fault(scene: Scene) -> None:
        for scenario in scenarios:
            await scenario.fault(scene)

    return replace(scenarios[0], name=name, fault=fault)


async def play(
    scenario: Scenario,
    fleet: Fleet,
    times: Times,
    *,
    redis: RedisServer | None = None,
    way: SlowWay | None = None,
    nodes: Sequence[Node] = (),
    shapes: Sequence[Shape] = SHAPES,
) -> tuple[Report, list[str]]:
    """Return the outcomes, and a sentence for each broken guarantee. The fleet is complete again afterwards, if possible."""
    load = Load(list(fleet.routers), times.rate, times.patience, shapes)
    scene = Scene(fleet, load, times, redis, way, nodes)
    async with load:
        await asyncio.sleep(times.before)
        await scenario.fault(scene)
        await asyncio.sleep(times.after)
    if not scenario.for_good:
        await asyncio.to_thread(fleet.settled)
    return load.report, broken_promises(scenario, scene)


def broken_promises(scenario: Scenario, scene: Scene) -> list[str]:
    report, times = scene.load.report, scene.times
    problems = []

    def promise(kept: bool, otherwise: str) -> None:
        if not kept:
            problems.append(otherwise)

    for kind in ("refused", "hung"):
        promise(not report.of(kind), f"{len(report.of(kind))} {kind}: {[outcome.detail for outcome in report.of(kind)][:3]}")
    for kind, allowed in (("cut", scenario.cuts), ("broken", scenario.resets), ("reset", scenario.resets)):
        seen = report.of(kind)
        promise(allowed or not seen, f"{len(seen)} {kind}: {[outcome.detail for outcome in seen][:3]}")
        strangers = [outcome for outcome in seen if not {outcome.pod, outcome.router} & scene.hurt]
        promise(not strangers, f"{len(strangers)} {kind} that the fault did not touch")
    if scenario.cuts:
        promise(bool(report.of("cut")), f"none of {scene.lost} streams under way was told of the loss")
    if scenario.resets:
        promise(bool(report.of("broken")), "no stream was under way on the router: nothing was tried")
    promise(report.worst_gap < times.silence + 6, f"a stream was silent for {report.worst_gap:.1f} s")
    begun = times.moved + (times.down + 20 if scenario.holds else 0)  # the requests of a minute are then served immediately
    promise(report.worst_first < begun, f"an answer began after {report.worst_first:.1f} s")
    promise(len(report.of("ok")) > len(report.outcomes) // 2, f"only {len(report.of('ok'))} of {len(report.outcomes)} were served")
    return problems
