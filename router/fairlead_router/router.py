"""The parts of one router, put together."""

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from fairlead_index.reader import IndexReader
from fairlead_router.admission import Admission
from fairlead_router.config import RouterConfig
from fairlead_router.discovery import follow, source_of
from fairlead_router.formats import PromptFormats
from fairlead_router.front import Front
from fairlead_router.metrics import Metrics
from fairlead_router.policies import LeastLoad, Policy, Random, RoundRobin, Session
from fairlead_router.poller import Poller
from fairlead_router.prompts import Prompts
from fairlead_router.proxy import Proxy
from fairlead_router.steering import PrefixAware
from fairlead_router.workers import WorkerTable

if TYPE_CHECKING:
    from fairlead_router.picker.server import PickerServer

logger = logging.getLogger(__name__)


class Router:
    """Owns what lives as long as the process. Build it, `start` it on a running loop, `close` it there."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._source = source_of(config.workers)
        self._threads = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2)), thread_name_prefix="prompt")
        self.table = WorkerTable()
        self.metrics = Metrics(self.table)
        self.formats = PromptFormats(self._threads)
        self.prompts = Prompts(self.formats, self._threads, config.policy == "PrefixAware", config.served_model_name)
        self._poller = Poller(self.table, self.formats, config.poll_interval)
        self._following: asyncio.Task[None] | None = None
        self._created = int(time.time())
        self.policy = self._make_policy()
        self.admission = Admission(config, self.table, self.metrics)
        self.proxy = Proxy(config, self.table, self.policy, self.metrics, self.admission)
        self.front = Front(config, self.admission, self.proxy, self.metrics)
        self.picker = self._make_picker()

    async def start(self) -> None:
        self.front.start()
        if self.picker is not None:
            await self.picker.start()
        self._following = asyncio.create_task(follow(self._source, self.table, self.config.poll_interval), name="discovery")

    async def close(self) -> None:
        if self.picker is not None:
            await self.picker.close()
        if self._following is not None:
            self._following.cancel()
        await self._poller.close()
        await self.front.close()
        await self.policy.close()
        for worker in self.table:
            worker.pool.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Not ready from now on, so that endpoints drop this router; what still comes is served, on connections that then close."""
        self.proxy.draining = True
        self.admission.drain(max(0.0, self.config.drain_grace + self.config.drain_timeout - 1))

    def leave(self) -> None:
        """The drain's grace is over: nothing new is taken."""
        if self.picker is not None:
            self.picker.drain()

    def _make_picker(self) -> "PickerServer | None":
        if self.config.picker_port is None:
            return None
        from fairlead_router.picker.picker import Picker
        from fairlead_router.picker.server import PickerServer  # gRPC costs 20 MB that a router without a gateway need not pay

        return PickerServer(Picker(self), self.config)

    def _make_policy(self) -> Policy:
        match self.config.policy:
            case "PrefixAware":
                reader = IndexReader(self.config.redis_url, self.config.namespace) if self.config.redis_url else None
                return PrefixAware(self.table, reader, self.metrics)
            case "LeastLoad":
                return LeastLoad(self.table)
            case "Random":
                return Random(self.table)
            case "RoundRobin":
                return RoundRobin(self.table)
            case "Session":
                return Session(self.table)

    def not_ready_reason(self) -> str:
        """Empty when ready: a worker was there, and its prompt format was fetched.

        Workers that went away do not make it unready: it holds their requests for a while, and then answers 503 with Retry-After.
        An unready router would be taken out of the Service, and clients would be refused the connection.
        """
        if self.proxy.draining:
            return "draining"
        if not self.front.keys.usable:
            return f"the key file cannot be used: {self.front.keys.problem}"
        if self.formats.current:
            return ""
        return "no prompt format yet" if self.table.usable() else "no worker is ready"

    def models(self) -> list[dict[str, Any]]:
        """OpenAI's model objects."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "fairlead",
                "max_model_len": self.formats.max_model_len(name),
            }
            for name in self.prompts.model_names()
        ]

    def picture(self) -> dict[str, Any]:
        """The table that `fairlead status` shows."""
        workers = [
            {
                "pod": worker.pod,
                "address": worker.address,
                "ready": worker.ready and not worker.silent,
                "draining": worker.draining,
                "usable": worker.usable,
                "reason": "silent" if worker.silent else worker.reason,
                "in_flight": worker.in_flight,
                "source": "discovery" if worker.discovered else "index",
                "load": msgspec.to_builtins(worker.load),
            }
            for worker in sorted(self.table, key=lambda worker: worker.address)
        ]
        index = self.policy.index if isinstance(self.policy, PrefixAware) else "unused"
        return {"service": self.config.service_name, "policy": self.config.policy, "index": index, "workers": workers}
