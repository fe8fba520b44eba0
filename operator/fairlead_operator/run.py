"""The operator as one coroutine: it watches and resyncs from the start, and reconciles once it holds the lease.

It runs until a stop, or until an essential task ends. Health is served throughout.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from typing import Any, cast

import kopf

from fairlead_common.telemetry.tracer import Tracer, TracingError, create_tracer
from fairlead_operator.config import OperatorConfig
from fairlead_operator.credentials.manager import CredentialsManager
from fairlead_operator.credentials.own_secret import OwnSecret
from fairlead_operator.kube.cache import Cache
from fairlead_operator.kube.client import Cluster, own_namespace
from fairlead_operator.kube.discovery import KindDiscovery
from fairlead_operator.kube.event_recorder import EventRecorder
from fairlead_operator.kube.gateways import GatewayReader
from fairlead_operator.kube.leader_election import LeaderElector
from fairlead_operator.kube.reflector import Reflectors
from fairlead_operator.kube.resync import STALE, Resync
from fairlead_operator.kube.workqueue import WorkQueue
from fairlead_operator.polling.hub import HubResolver
from fairlead_operator.polling.prober import Prober
from fairlead_operator.process import health
from fairlead_operator.process.loop_thread import LoopThread
from fairlead_operator.process.memory import limit_heap, trim_forever
from fairlead_operator.process.metrics import Metrics
from fairlead_operator.reconcile import handlers
from fairlead_operator.reconcile.controller import Controller
from fairlead_operator.reconcile.fleet import FleetRollout
from fairlead_operator.reconcile.reconciler import Dependencies

log = logging.getLogger(__name__)
MAX_CONCURRENT_RECONCILES = 16  # services that are written at the same time; the API server's priority and fairness bounds the rest


async def operate(
    config: OperatorConfig, stop: asyncio.Event, prober: Prober | None = None, started: Callable[[], None] = lambda: None
) -> None:
    """Run until `stop` is set. Otherwise raises the error of the task that ended: the process then exits and is restarted.

    `started` is called after kopf has installed its signal handlers, so that the caller can install its own again.
    """
    limit_heap()
    async with AsyncExitStack() as stack:
        loop_thread = await stack.enter_async_context(LoopThread.start("lease"))
        lease_cluster = await stack.enter_async_context(loop_thread.enter(Cluster.connect(config.kubeconfig)))
        elector = LeaderElector(lease_cluster, config.lease_namespace or own_namespace(config.watched_namespaces[0]), config.lease_name)
        metrics = Metrics()
        tracer = _create_tracer(config)
        if tracer is not None:
            stack.push_async_callback(asyncio.to_thread, tracer.close)
        cluster = await stack.enter_async_context(Cluster.connect(config.kubeconfig, elector.check, metrics.count_response))
        prober = prober or Prober(config.cluster_domain)
        stack.push_async_callback(prober.close)
        operator = _Operator(config, cluster, elector, loop_thread, prober, metrics, tracer)
        port = await stack.enter_async_context(health.serve(config.health_port, operator.problem, operator.readiness, metrics.text))
        log.info("health on port %d", port)
        await operator.run(stop, started)


def _create_tracer(config: OperatorConfig) -> Tracer | None:
    """Return the tracer of reconciles; None without an endpoint, or if it cannot work: services need the operator, not its traces."""
    try:
        return create_tracer("fairlead-operator", config.otlp_endpoint, {"service.instance.id": socket.gethostname()})
    except TracingError as error:
        log.warning("no traces of reconciles are sent: %s", error)
        return None


class _Operator:
    """A standby runs everything but the reconcilers. It follows services and children, so that taking over means only starting them.

    Only reconcilers write.
    """

    def __init__(
        self,
        config: OperatorConfig,
        cluster: Cluster,
        elector: LeaderElector,
        loop_thread: LoopThread,
        prober: Prober,
        metrics: Metrics,
        tracer: Tracer | None,
    ) -> None:
        """`loop_thread` runs the elector and its connection, so that it renews the lease however busy the reconcilers are.

        An operator with a thousand services must not lose its lease. One that hangs no longer answers /healthz: the kubelet restarts it.
        """
        self._config = config
        self._elector = elector
        self._loop_thread = loop_thread
        self._controller = Controller()
        self._cache = Cache(self._controller.wake)
        self._reflectors = Reflectors(cluster, self._cache, config.watched_namespaces)
        self._resync = Resync(cluster, self._cache, config.watched_namespaces)
        self._optional = KindDiscovery(cluster, self._cache, config.watched_namespaces, self._controller.wake_all)
        self._gateways = GatewayReader(cluster, self._cache, self._controller.wake_all)
        self._event_recorder = EventRecorder(cluster)
        self._watching = asyncio.Event()  # set once services are watched
        home = config.lease_namespace or own_namespace(config.watched_namespaces[0])
        secret = OwnSecret(cluster, home, config.credentials_secret, config.deployment)
        self._credentials = CredentialsManager(config, secret, self._cache.identities, self._controller.wake_all)
        self._dependencies = Dependencies(
            cluster,
            self._cache,
            prober,
            config.settings,
            self._event_recorder.record,
            WorkQueue(MAX_CONCURRENT_RECONCILES),
            FleetRollout(config.settings.waves, self._cache, self._controller.wake),
            HubResolver(config.hub_endpoint),
            served=lambda: self._optional.served,
            unknown=lambda: self._optional.unknown,
            metrics=metrics,
            gateway=self._gateways.find,
            redis=lambda: self._credentials.seen,
            tracer=tracer,
        )
        metrics.register_sources(
            lambda: elector.leading, lambda: self._resync.seconds_since_resync, lambda: len(self._controller), self._reported_services
        )

    def _reported_services(self) -> Iterable[Mapping[str, Any]]:
        """Return the services that this process reports in metrics: only the leader reports them."""
        return self._cache.services() if self._elector.leading else ()

    def problem(self) -> str:
        """Return why the process is unhealthy; empty: it is healthy."""
        ages = {
            "watches": self._reflectors.seconds_since_response,
            "the lease": self._elector.seconds_since_response,
            "a full list": self._resync.seconds_since_resync,
        }
        late = [f"{what} for {age:.0f} s" for what, age in ages.items() if age > STALE]
        return f"the API server has not answered requests for {' and '.join(late)}: check its health, and the network" if late else ""

    def readiness(self) -> health.Readiness:
        """Return whether the process is ready. A standby is ready when it knows everything that it needs to take over."""
        leading, holder = self._elector.leading, self._elector.holder
        informed = self._watching.is_set() and self._reflectors.has_synced
        return health.Readiness(informed and (self._controller.is_started if leading else bool(holder)), leading, holder)

    async def run(self, stop: asyncio.Event, started: Callable[[], None]) -> None:
        tasks = {
            asyncio.create_task(work, name=name)
            for name, work in (
                ("watches of children", self._reflectors.run()),
                ("resync", self._resync.run()),
                ("optional kinds", self._optional.run()),
                ("gateways", self._gateways.run()),
                ("lease", self._lead()),
                ("memory", trim_forever()),
            )
        }
        watch_task = asyncio.create_task(_run_kopf(self._config, self._cache, stop, self._watching, started), name="watch of services")
        stop_task = asyncio.create_task(stop.wait(), name="stop")
        try:
            done, _ = await asyncio.wait({*tasks, watch_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._stop(tasks | {stop_task})
            if not stop.is_set():
                watch_task.cancel()
            await asyncio.gather(watch_task, return_exceptions=True)
        for task in (*done, watch_task):
            if not task.cancelled():
                task.result()
        if not stop.is_set():
            raise RuntimeError("the watches have ended without a stop")

    async def _stop(self, tasks: set[asyncio.Task[Any]]) -> None:
        """Stop the writers first, then release the lease: its next holder need not wait for kopf, which takes seconds."""
        await self._controller.close()
        await self._event_recorder.close()
        await self._dependencies.hub.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop_thread.run(self._elector.release())

    async def _lead(self) -> None:
        here, leads = asyncio.get_running_loop(), asyncio.Event()
        election = asyncio.ensure_future(self._loop_thread.run(self._elector.lead(lambda: here.call_soon_threadsafe(leads.set))))
        try:
            await asyncio.gather(election, self._reconcile(leads))
        finally:
            election.cancel()  # else it would end the process as fenced once the lease is released, and hide the error

    async def _reconcile(self, leads: asyncio.Event) -> None:
        """Reconcile once all children and the optional kinds are known and the lease is held.

        A reconciler that had not seen the pods of a running service would report it as not ready, and an unlisted gateway as missing.
        """
        await self._reflectors.wait_synced()
        await self._optional.discovered.wait()
        await leads.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._credentials.run(), name="redis credentials")
            await self._credentials.reconciled.wait()  # otherwise a new pod would start before its Secret exists
            fleet_run = self._dependencies.fleet.run(self._dependencies.cluster, self._config.watched_namespaces)
            group.create_task(fleet_run, name="rollout of images")
            self._controller.start(self._dependencies)


async def _run_kopf(config: OperatorConfig, cache: Cache, stop: asyncio.Event, ready: asyncio.Event, started: Callable[[], None]) -> None:
    """Run both halves of `kopf.operator`. Between them kopf has installed its signal handlers, and `started` may replace them."""
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=handlers.build_registry(cache),
        settings=handlers.build_settings(),
        standalone=True,
        identity=cast(Any, socket.gethostname()),  # otherwise kopf looks up the user's name, which a container's bare user id does not have
        clusterwide=not config.namespaces,
        namespaces=config.watched_namespaces if config.namespaces else [],
        stop_flag=stop,
        ready_flag=ready,
    )
    started()
    await kopf.run_tasks(tasks, ignored=others)
