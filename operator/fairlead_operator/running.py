"""The operator as one coroutine: stand by until the lease is ours, then watches, loops and resync, until a stop or the end of something
essential. Health is served from the first moment.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, cast

import kopf

from fairlead_operator import health
from fairlead_operator.aside import Aside
from fairlead_operator.config import OperatorConfig
from fairlead_operator.election import Elector
from fairlead_operator.memory import give_back
from fairlead_operator.metrics import Metrics
from fairlead_operator.reconcile import handlers
from fairlead_operator.reconcile.announcer import Announcer
from fairlead_operator.reconcile.client import Cluster, own_namespace
from fairlead_operator.reconcile.fleet import Fleet
from fairlead_operator.reconcile.lanes import Lanes
from fairlead_operator.reconcile.loop import Tools
from fairlead_operator.reconcile.optional import OptionalKinds
from fairlead_operator.reconcile.prober import Prober
from fairlead_operator.reconcile.resync import STALE, Resync
from fairlead_operator.reconcile.store import Store
from fairlead_operator.reconcile.watches import Watches

log = logging.getLogger(__name__)
LANES = 16  # services that are written at the same time: the API server's own fairness does the rest


async def operate(
    config: OperatorConfig, stop: asyncio.Event, prober: Prober | None = None, started: Callable[[], None] = lambda: None
) -> None:
    """Run until `stop` is set. Raises what ended it when that was not a stop: the process then exits and is started anew.

    `started` is called once kopf has set itself up; it is the place to take the signals back, which kopf handles for itself.
    """
    async with AsyncExitStack() as stack:
        aside = await stack.enter_async_context(Aside.started("lease"))
        renewing = await stack.enter_async_context(aside.entered(Cluster.connect(config.kubeconfig)))
        elector = Elector(renewing, config.lease_namespace or own_namespace(config.namespace), config.lease_name)
        api = await stack.enter_async_context(Cluster.connect(config.kubeconfig))
        metrics = Metrics()
        writing = api.guarded(elector.check, metrics.answered)
        acting = _Acting(config, writing, elector, aside, prober or Prober(config.cluster_domain), metrics)
        stack.push_async_callback(acting.close)
        port = await stack.enter_async_context(health.served(config.health_port, acting.problem, acting.readiness, metrics.text))
        log.info("health on port %d", port)
        acting.look_on()
        if not await _unless_stopped(aside.do(elector.acquire()), stop):
            return
        # First of all that is undone, when nothing of us writes any more:
        stack.push_async_callback(lambda: aside.do(elector.release()))
        await acting.run(stop, started)


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Do `work` to its end, and then True; False when a stop came first."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        doing.cancel()
        stopping.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)


class _Acting:
    """What the leader runs. A standby has only its watches of children: it knows all of them when it is its turn to act, and its first
    passes need not wait until a hundred pages are listed. Without services in its store it has no loops, and writes nothing."""

    def __init__(self, config: OperatorConfig, cluster: Cluster, elector: Elector, aside: Aside, prober: Prober, metrics: Metrics) -> None:
        """`aside`: where the elector and its connection live. It renews there, whatever the passes here take: an operator that is busy with
        a thousand services must not lose its lease for it. One that hangs answers /healthz no more, and is ended by the kubelet."""
        self._config = config
        self._elector = elector
        self._aside = aside
        self._prober = prober
        self._fleet = Fleet()
        self._store = Store(self._fleet.wake)
        self._watches = Watches(cluster, self._store, config.namespace)
        self._resync = Resync(cluster, self._store, config.namespace)
        self._looking_on: list[asyncio.Task[None]] = []
        self._watching = asyncio.Event()
        self._optional = OptionalKinds(cluster, self._store, config.namespace, self._fleet.wake_all)
        self._announcer = Announcer(cluster)
        lanes = Lanes(LANES)
        self._fleet.open(
            Tools(cluster, self._store, prober, config.settings, self._announcer.announce, lanes, lambda: self._optional.served, metrics)
        )
        metrics.watch(lambda: elector.leading, lambda: self._resync.age, lambda: len(self._fleet), self._store.services)

    def problem(self) -> str:
        silent = self._watches.silent_for > STALE
        unheard = (silent or self._resync.stale) if self._elector.leading else self._elector.silent_for > STALE
        return "no answer for too long: the API server cannot be reached" if unheard else ""

    def readiness(self) -> health.Readiness:
        leading = self._elector.leading
        return health.Readiness(self._watching.is_set() if leading else bool(self._elector.holder), leading, self._elector.holder)

    def look_on(self) -> None:
        """Begin with what needs no lease."""
        self._looking_on = [
            asyncio.create_task(self._watches.run(), name="watches of children"),
            asyncio.create_task(give_back(), name="memory"),
        ]

    async def close(self) -> None:
        for task in self._looking_on:
            task.cancel()
        await asyncio.gather(*self._looking_on, return_exceptions=True)
        await self._fleet.close()
        await self._announcer.close()
        await self._prober.close()

    async def run(self, stop: asyncio.Event, started: Callable[[], None]) -> None:
        self._resync.begin()
        await self._optional.look()  # before the first loop looks: or it would take a gateway for missing
        watching = asyncio.create_task(self._watch_services(stop, started), name="watch of services")
        relisting = asyncio.create_task(self._resync.run(), name="resync")
        looking = asyncio.create_task(self._optional.run(), name="optional kinds")
        leading = asyncio.create_task(self._aside.do(self._elector.keep()), name="lease")
        ending = asyncio.create_task(self._end_ours(stop), name="end of loops")
        done, pending = await asyncio.wait({*self._looking_on, watching, relisting, leading}, return_when=asyncio.FIRST_COMPLETED)
        pending |= {ending, looking}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self._fleet.close()
        for task in done:
            task.result()
        if not stop.is_set():
            raise RuntimeError("the watches have ended without a stop")

    async def _watch_services(self, stop: asyncio.Event, started: Callable[[], None]) -> None:
        """A loop starts when its service is seen, so services are looked for last."""
        if await _unless_stopped(self._watches.listed(), stop):
            await _watch(self._config, self._store, stop, self._watching, started)

    async def _end_ours(self, stop: asyncio.Event) -> None:
        """At once when a stop is asked for: kopf waits five seconds for tasks that it does not know."""
        await stop.wait()
        await self._fleet.close()
        await self._announcer.close()


async def _watch(config: OperatorConfig, store: Store, stop: asyncio.Event, ready: asyncio.Event, started: Callable[[], None]) -> None:
    """`kopf.operator`, in its two halves: between them kopf has taken the signals, and `started` may take them back."""
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=handlers.registry(store),
        settings=handlers.settings(),
        standalone=True,
        identity=cast(Any, socket.gethostname()),  # else kopf asks for the user's name, which a container's bare user id has not
        clusterwide=not config.namespace,
        namespaces=[config.namespace] if config.namespace else [],
        stop_flag=stop,
        ready_flag=ready,
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)
