"""The parts of one router, put together."""

import asyncio
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fairlead_common.discovery import create_source
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_index.redis.scripts import Scripts
from fairlead_router.config import RouterConfig
from fairlead_router.fleet.discovery import follow
from fairlead_router.fleet.poller import Poller
from fairlead_router.fleet.prompt_formats import PromptFormats
from fairlead_router.fleet.scale_up_status import Coming
from fairlead_router.fleet.workers import WorkerTable
from fairlead_router.interop.queries import Queries
from fairlead_router.interop.redirect import Redirector
from fairlead_router.interop.stack_metrics import StackMetrics
from fairlead_router.metrics import Metrics
from fairlead_router.request.prompts import Prompts
from fairlead_router.routing.canary_file import SplitFile
from fairlead_router.routing.canary_metrics import SplitMetrics
from fairlead_router.routing.canary_split import SplitPolicy
from fairlead_router.routing.policies import LeastLoad, Policy, Random, RoundRobin, Session
from fairlead_router.routing.prefix_aware import IndexAt, PrefixAware
from fairlead_router.serving.admission import Admission
from fairlead_router.serving.demand import Demand
from fairlead_router.serving.probe import Probe
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.request_handler import Front
from fairlead_router.supervision import keep

if TYPE_CHECKING:
    from fairlead_router.interop.picker.server import PickerServer

logger = logging.getLogger(__name__)

QUOTA_SECONDS = 0.5
"""For Redis to answer about token rates, which nobody waits for."""


class Router:
    """Owns what lives as long as the process. Build it, `start` it on a running loop, `close` it there."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._source = create_source(config.workers)
        self._threads = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2)), thread_name_prefix="prompt")
        self.table = WorkerTable(silence_timeout=config.silence_timeout, admin_port=config.worker_admin_port)
        self.metrics = Metrics(self.table)
        self.formats = PromptFormats(self._threads, TokenCache(config.token_cache_bytes))
        self.metrics.watch_token_cache(self.formats.cache)
        self._hurry = asyncio.Event()
        tokenize = config.policy == "PrefixAware"
        self.policy = self._make_policy()
        self.split = self._make_split()
        canary_for = None
        if self.split is not None:
            canary_for = self.split.canary_for
            self.metrics.registry.register(SplitMetrics(self.split.report))
        self.prompts = Prompts(self.formats, self._threads, tokenize, config.served_model_name, self.table.adapters, canary_for)
        self.stack_metrics: StackMetrics | None = None
        if config.metrics_names == "vllm":
            self.stack_metrics = StackMetrics(self.table, lambda: next(iter(self.prompts.model_names()), ""))
            self.metrics.registry.register(self.stack_metrics)
        self._poller = Poller(self.table, self.formats, config.poll_interval, config.silence_timeout, self.metrics.task_failures)
        self._following: asyncio.Task[None] | None = None
        self._created = int(time.time())
        self._steering: Policy = self.split or self.policy
        self.coming = Coming()
        self.admission = Admission(config, self.table, self.metrics, self.coming)
        alone = self.policy.held_alone if isinstance(self.policy, PrefixAware) else dict
        self.demand = Demand(self.table, self.coming, self.admission.queued, alone)
        self.proxy = Proxy(config, self.table, self._steering, self.metrics, self.admission)
        redis = config.redis if config.api_keys_file else None
        scripts = Scripts(redis, config.namespace, timeout=QUOTA_SECONDS) if redis else None
        self.front = Front(config, self.admission, self.proxy, self.metrics, scripts)
        self.probe = Probe(self.front, self.prompts, self.table)
        self.redirector = Redirector(config, self.proxy, self.admission)
        match = self.policy.match if isinstance(self.policy, PrefixAware) and config.redis else None
        self.queries = Queries(self.formats, self.table, match, self._threads)
        self.picker = self._make_picker()

    async def start(self) -> None:
        self.front.start()
        self._steering.start()
        if self.picker is not None:
            await self.picker.start()
        following = lambda: follow(self._source, self.table, self.config.poll_interval, self._hurry)  # noqa: E731
        self._following = keep("discovery", following, self.metrics.task_failures)

    async def close(self) -> None:
        if self.picker is not None:
            await self.picker.close()
        if self._following is not None:
            self._following.cancel()
        await self._poller.close()
        await self.probe.close()
        await self.front.close()
        await self._steering.close()
        for worker in self.table:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Not ready from now on, so that endpoints drop this router; what still comes is served, on connections that then close."""
        self.proxy.draining = True
        self.demand.drain()
        self.admission.drain(max(0.0, self.config.drain_grace + self.config.drain_timeout - 1))

    def leave(self) -> None:
        """The drain's grace is over: nothing new is taken."""
        if self.picker is not None:
            self.picker.drain()

    def _make_picker(self) -> "PickerServer | None":
        if self.config.picker_port is None:
            return None
        from fairlead_router.interop.picker.picker import Picker
        from fairlead_router.interop.picker.server import PickerServer  # gRPC costs 20 MB that a router without a gateway need not pay

        front, came, coming = self.front, self.demand.came, self.coming
        picker = Picker(self.config, self.table, self._steering, front, self.prompts, self.metrics, self.not_ready_reason, came, coming)
        return PickerServer(picker, self.config)

    def _make_split(self) -> SplitPolicy | None:
        if not self.config.split_file:
            return None
        return SplitPolicy(self.table, self.policy, SplitFile(Path(self.config.split_file)), self.metrics.task_failures)

    def _make_policy(self) -> Policy:
        match self.config.policy:
            case "PrefixAware":
                config = self.config
                index = IndexAt(config.redis, config.namespace, config.index_mode, config.index_groups) if config.redis else None
                return PrefixAware(self.table, index, self.metrics, self._hurry.set)
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
        if self.formats.current or self.config.ready_without_workers:
            return ""
        return "no prompt format yet" if self.table.usable() else "no worker is ready"

    def models(self) -> list[dict[str, Any]]:
        """OpenAI's model objects."""
        adapters = self.table.adapters()

        def described(name: str) -> dict[str, Any]:
            own = self.formats.describe(name)
            return adapters[name].described(own["max_model_len"]) if name in adapters else own

        return [
            {"id": name, "object": "model", "created": self._created, "owned_by": "fairlead", **described(name)}
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
                "incarnation": worker.incarnation,
                "canary": worker.canary,
                "load": msgspec.to_builtins(worker.load),
                "prediction": worker.prediction.shown(),
            }
            for worker in sorted(self.table, key=lambda worker: worker.address)
        ]
        known: dict[str, Any] = {
            "service": self.config.service_name,
            "policy": self.config.policy,
            "index": "unused",
            "index_reason": "",
            "index_read": "",
        }
        if isinstance(self.policy, PrefixAware):
            known |= {"index": self.policy.index, "index_reason": self.policy.index_reason, "index_read": self.policy.reading}
            known["ignored_records"] = self.policy.trust.shown()
        return {**known, "workers": workers}
