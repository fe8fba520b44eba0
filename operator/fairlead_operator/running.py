"""The operator as one coroutine: watches, loops, resync and health, until a stop is asked for or something essential ends."""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, cast

import kopf

from fairlead_operator import health
from fairlead_operator.config import OperatorConfig
from fairlead_operator.reconcile import handlers
from fairlead_operator.reconcile.client import Cluster
from fairlead_operator.reconcile.fleet import Fleet
from fairlead_operator.reconcile.loop import Tools
from fairlead_operator.reconcile.prober import Prober
from fairlead_operator.reconcile.resync import Resync
from fairlead_operator.reconcile.store import Store

log = logging.getLogger(__name__)
LANES = 16  # services that are written at the same time: the API server's own fairness does the rest


async def operate(
    config: OperatorConfig, stop: asyncio.Event, prober: Prober | None = None, started: Callable[[], None] = lambda: None
) -> None:
    """Run until `stop` is set. Raises what ended it when that was not a stop: the process then exits and is started anew.

    `started` is called once kopf has set itself up; it is the place to take the signals back, which kopf handles for itself.
    """
    fleet = Fleet()
    store = Store(fleet.wake)
    ready = asyncio.Event()
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster.connect(config.kubeconfig))
        prober = prober or Prober(config.cluster_domain)
        stack.push_async_callback(prober.close)
        stack.push_async_callback(fleet.close)
        fleet.open(Tools(cluster, store, prober, config.settings, handlers.announce, asyncio.Semaphore(LANES)))
        resync = Resync(cluster, store, config.namespace)

        def problem() -> str:
            return "no complete listing for too long: the API server cannot be reached" if resync.stale else ""

        port = await stack.enter_async_context(health.served(config.health_port, problem, ready.is_set))
        log.info("health on port %d", port)
        watching = asyncio.create_task(_watch(config, store, fleet, stop, ready, started), name="watches")
        relisting = asyncio.create_task(resync.run(), name="resync")
        ending = asyncio.create_task(_end_loops(stop, fleet), name="end of loops")
        done, pending = await asyncio.wait({watching, relisting}, return_when=asyncio.FIRST_COMPLETED)
        pending.add(ending)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            task.result()
        if not stop.is_set():
            raise RuntimeError("the watches have ended without a stop")


async def _end_loops(stop: asyncio.Event, fleet: Fleet) -> None:
    """At once when a stop is asked for: kopf waits five seconds for tasks that it does not know."""
    await stop.wait()
    await fleet.close()


async def _watch(
    config: OperatorConfig, store: Store, fleet: Fleet, stop: asyncio.Event, ready: asyncio.Event, started: Callable[[], None]
) -> None:
    """`kopf.operator`, in its two halves: between them kopf has taken the signals, and `started` may take them back."""
    others = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=handlers.registry(store, fleet),
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
