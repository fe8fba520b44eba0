"""The routers that the operator reaches: stand-ins, or real ones in this process for the rows whose cause is a router's."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any

from tests.router.harness import running_router
from tests.router.stand_in_worker import StandIn

from fairlead_operator.polling.prober import Prober, ProbeTarget


class ServiceProber(Prober):
    """Reaches the service of a namespace by the URL that its row gives, and every other service by `default_url`."""

    def __init__(self, default_url: str) -> None:
        super().__init__("cluster.local", default_url)
        self._by_namespace: dict[str, Prober] = {}
        self._by_pod: dict[str, Prober] = {}

    def route(self, namespace: str, pod_ip: str, url: str) -> None:
        self._by_namespace[namespace] = self._by_pod[pod_ip] = Prober("cluster.local", url)

    async def complete(self, target: ProbeTarget) -> str:
        prober = self._by_namespace.get(target.namespace)
        return await (prober.complete(target) if prober is not None else super().complete(target))

    async def fetch_workers(self, address: str) -> Mapping[str, Any]:
        prober = self._by_pod.get(address.rpartition(":")[0])
        return await (prober.fetch_workers(address) if prober is not None else super().fetch_workers(address))

    async def close(self) -> None:
        await asyncio.gather(super().close(), *(one.close() for one in self._by_namespace.values()))


class _Loop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, sig: int, callback: Any, *args: Any) -> None:
        """Ignore it: only the loop of the main thread may handle signals."""


class Network:
    """Real routers, each with one worker that answers, in an event loop of their own. Ends them with the context."""

    def __init__(self, prober: ServiceProber) -> None:
        self.prober = prober
        self.urls: dict[str, str] = {}
        self.admin_urls: dict[str, str] = {}
        self._loop = _Loop()
        self._stack = AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name="routers")

    def __enter__(self) -> "Network":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._submit(self._stack.aclose()).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def start_router(self, namespace: str, *, worker: bool = True, **settings: Any) -> str:
        """Start a router and lead the service of `namespace` to it. Returns the IP address of its pod."""
        pod_ip = f"127.1.0.{len(self.urls) + 1}"
        url, self.admin_urls[namespace] = self._submit(self._start_router(worker, settings)).result(60)
        self.urls[namespace] = url
        self.prober.route(namespace, pod_ip, url)
        return pod_ip

    def on_exit(self, stop: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(self._stack.callback, stop)

    async def _start_router(self, worker: bool, settings: dict[str, Any]) -> tuple[str, str]:
        if "api_keys_file" in settings:  # one port asks for a key on admin paths too
            settings |= {"admin_port": 0}
        address = "127.0.0.1:9"  # no process listens on this port
        if worker:
            started = await StandIn(pod="pod-0").start()
            self._stack.push_async_callback(started.kill)
            address = started.address
        router = await self._stack.enter_async_context(running_router(workers=f"static://{address}", **settings))
        if worker:
            await router.usable(1)
        return f"http://127.0.0.1:{router.port}", f"http://127.0.0.1:{router.server.admin_port}"

    def _submit(self, work: Any) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)
