"""Assembly of one router from its parts."""

import asyncio
import logging
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from fairlead_common.discovery import create_source
from fairlead_common.prompts.token_cache import TokenCache
from fairlead_common.protocols.model_list import Model
from fairlead_common.routing_policy import RoutingPolicy
from fairlead_common.telemetry.tracer import create_tracer
from fairlead_index.redis.scripts import Scripts
from fairlead_router.config import RouterConfig
from fairlead_router.fleet.discovery import follow_discovery
from fairlead_router.fleet.poller import Poller
from fairlead_router.fleet.prompt_formats import PromptFormats
from fairlead_router.fleet.scale_up_status import ScaleUpStatus
from fairlead_router.fleet.workers import Worker, WorkerTable, slices
from fairlead_router.interop.index_lookups import IndexLookups
from fairlead_router.interop.queries import Queries
from fairlead_router.interop.redirect import Redirector
from fairlead_router.interop.score_page import ScorePage
from fairlead_router.interop.stack_metrics import StackMetrics
from fairlead_router.metrics import Metrics
from fairlead_router.request.engine_rendering import EngineRendering
from fairlead_router.request.prompts import Prompts
from fairlead_router.request.request_log import RequestLog
from fairlead_router.routing.canary_split import CanaryPolicy, canary_metrics
from fairlead_router.routing.policies import LeastLoad, Policy, Random, RoundRobin, Session
from fairlead_router.routing.prefix_aware import PrefixAware
from fairlead_router.routing.prefix_lookup import IndexConfig
from fairlead_router.serving.admission import Admission
from fairlead_router.serving.demand import Demand
from fairlead_router.serving.model_routes import ModelRoutes
from fairlead_router.serving.probe import Probe
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.request_handler import RequestHandler
from fairlead_router.serving.slo_gate import SloGate
from fairlead_router.serving.slo_report import SloReport
from fairlead_router.supervision import stop_tasks, supervise
from fairlead_router.tenancy.shared_secret import SharedSecret

if TYPE_CHECKING:
    from fairlead_router.interop.picker.server import PickerServer
    from fairlead_router.serving.batch_forwarding import BatchForwarder
    from fairlead_router.serving.service_forwarding import ServiceForwarder

logger = logging.getLogger(__name__)

QUOTA_SECONDS = 0.5
"""Deadline of a Redis call for token rates. No request waits for that call."""


class Router:
    """Owner of the state that lives as long as the process. Build it, then `start` and `close` it on a running loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        identity = {"service.instance.id": socket.gethostname(), "fairlead.inference_service": config.namespace}
        self.tracer = create_tracer("fairlead-router", config.otlp_traces_endpoint, identity)
        self._source = create_source(config.workers)
        self._threads = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 2)), thread_name_prefix="prompt")
        self.table = WorkerTable(silence_timeout=config.silence_timeout, admin_port=config.worker_admin_port)
        self.metrics = Metrics(self.table)
        self.formats = PromptFormats(self._threads, TokenCache())
        self.metrics.watch_token_cache(self.formats.cache)
        self._refresh_discovery = asyncio.Event()
        tokenize = config.policy == "PrefixAware"
        self.policy = self._make_policy()
        self.canary = self._make_split()
        canary_for = None
        if (canary := self.canary) is not None:
            canary_for = canary.canary_for
            self.metrics.watch(lambda: canary_metrics(canary.report()))
        self.prompts = Prompts(self.formats, self._threads, tokenize, config.served_model_name, self.table.adapters, canary_for)
        self.rendering = EngineRendering(self.table, self.prompts)
        self.stack_metrics: StackMetrics | None = None
        if config.metrics_names == "vllm":
            self.stack_metrics = StackMetrics(self.table, lambda: next(iter(self.prompts.model_names()), ""))
            self.metrics.registry.register(self.stack_metrics)
        self._poller = Poller(self.table, self.formats, config.poll_interval, config.silence_timeout, self.metrics.task_failures)
        self._discovery_task: asyncio.Task[None] | None = None
        self._created = int(time.time())
        self._routing_policy: Policy = self.canary or self.policy
        self.scale_up = ScaleUpStatus()
        classes = config.service_classes
        prefix_aware = self.policy if isinstance(self.policy, PrefixAware) else None
        predict = prefix_aware.predict if prefix_aware else lambda request: {}
        shared = prefix_aware.tokens_ahead if prefix_aware else lambda address: 0.0
        gate = SloGate(self.table, self.metrics, classes, predict, shared, has_score=prefix_aware is not None)
        self.admission = Admission(config, self.table, self.metrics, self.scale_up, gate, predict)
        self.slo_report = SloReport(self.metrics, classes)
        unique_shares = prefix_aware.unique_shares if prefix_aware else dict
        self.demand = Demand(self.table, self.scale_up, self.admission.queued, unique_shares)
        self.proxy = Proxy(config, self.table, self._routing_policy, self.metrics, self.admission)
        redis = config.redis if config.api_keys_file else None
        scripts = Scripts(redis, config.namespace, timeout=QUOTA_SECONDS) if redis else None
        self.handler = RequestHandler(config, self.admission, self.proxy, self.metrics, scripts)
        self.request_log = RequestLog() if config.console else None
        self.probe = Probe(self.handler, self.prompts, self.table)
        self.redirector = Redirector(config, self.proxy, self.admission)
        index = self._index_config()
        self.lookups = IndexLookups(prefix_aware, index) if prefix_aware is not None and index is not None else None
        self.score_page = ScorePage(self.prompts, self.table, prefix_aware, self.lookups, config.policy)
        self.queries = Queries(self.formats, self.table, self.lookups, self._threads)
        self.picker = self._make_picker()
        self.batches = self._make_batch_forwarder()
        self.services = self._make_service_forwarder()
        self._routes_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.handler.start()
        self._routing_policy.start()
        if self.picker is not None:
            await self.picker.start()
        if self.services is not None:
            self._routes_task = supervise("model routes", self.services.routes.follow, self.metrics.task_failures)
        follow = lambda: follow_discovery(self._source, self.table, self.config.poll_interval, self._refresh_discovery)  # noqa: E731
        self._discovery_task = supervise("discovery", follow, self.metrics.task_failures)

    async def close(self) -> None:
        if self.picker is not None:
            await self.picker.close()
        await stop_tasks(self._discovery_task, self._routes_task)
        for forwarder in (self.batches, self.services):
            if forwarder is not None:
                await forwarder.close()
        await self._poller.close()
        await self.probe.close()
        await self.rendering.close()
        await self.handler.close()
        if self.lookups is not None:
            await self.lookups.close()
        await self._routing_policy.close()
        self.prompts.close()
        for worker in self.table:
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    def drain(self) -> None:
        """Turn unready, so that Kubernetes removes this router's endpoint. Later requests are served, and then their connections close."""
        self.proxy.draining = True
        self.demand.drain()
        self.admission.drain(max(0.0, self.config.drain_grace + self.config.drain_timeout - 1))

    def stop_accepting(self) -> None:
        """Refuse new requests: the drain's grace period is over."""
        if self.picker is not None:
            self.picker.drain()

    def abort(self) -> None:
        """End the drain now."""
        if self.picker is not None:
            self.picker.abort()

    def _make_picker(self) -> "PickerServer | None":
        if self.config.picker_port is None:
            return None
        from fairlead_router.interop.picker.picker import Picker
        from fairlead_router.interop.picker.server import PickerServer  # imported late: gRPC costs 20 MB, and only gateways need it

        handler, count_prompt, scale_up = self.handler, self.demand.count_external, self.scale_up
        picker = Picker(
            self.config,
            self.table,
            self._routing_policy,
            handler,
            self.prompts,
            self.rendering,
            self.metrics,
            self.not_ready_reason,
            count_prompt,
            scale_up,
        )
        return PickerServer(picker, self.config)

    def _make_batch_forwarder(self) -> "BatchForwarder | None":
        if not self.config.batch_url:
            return None
        from fairlead_router.serving.batch_forwarding import BatchForwarder  # imported late: only services with batches need aiohttp

        return BatchForwarder(self.config.batch_url, SharedSecret(self.config.batch_secret_file))

    def _make_service_forwarder(self) -> "ServiceForwarder | None":
        if not self.config.model_routes_file:
            return None
        from fairlead_router.serving.service_forwarding import ServiceForwarder  # imported late, as above

        return ServiceForwarder(ModelRoutes(self.config.model_routes_file))

    def _make_split(self) -> CanaryPolicy | None:
        if not self.config.canary_file:
            return None
        return CanaryPolicy(self.table, self.policy, Path(self.config.canary_file), self.metrics.task_failures)

    def _index_config(self) -> IndexConfig | None:
        config = self.config
        if not config.redis:
            return None
        return IndexConfig(config.redis, config.namespace, config.index_mode)

    def _make_policy(self) -> Policy:
        name: RoutingPolicy = self.config.policy  # the import of its type makes an incremental mypy check this file again
        match name:
            case "PrefixAware":
                return PrefixAware(self.table, self._index_config(), self.metrics, self._refresh_discovery.set, self.config.console)
            case "LeastLoad":
                return LeastLoad(self.table)
            case "Random":
                return Random(self.table)
            case "RoundRobin":
                return RoundRobin(self.table)
            case "Session":
                return Session(self.table)
        assert_never(name)

    def not_ready_reason(self) -> str:
        """Return why the router is not ready; empty when it is: a worker was ready once, and its prompt format was fetched.

        Losing all workers does not make the router unready: it holds requests for a while, then answers 503 with Retry-After.
        Kubernetes would remove an unready router from the Service, and clients would get no connection at all.
        """
        if self.proxy.draining:
            return "draining"
        if not self.handler.keys.is_usable:
            return f"the key file cannot be used: {self.handler.keys.problem}"
        if self.formats.current or self.config.ready_without_workers:
            return ""
        return "no prompt format yet" if self.table.usable() else "no worker is ready"

    def models(self) -> list[Model]:
        """Return the served models, then those of other services."""
        adapters = self.table.adapters()

        def describe(name: str) -> dict[str, Any]:
            model = self.formats.describe(name)
            return adapters[name].model_fields(model["max_model_len"]) if name in adapters else model

        own = self.prompts.model_names()
        others = self.services.routes.names() if self.services is not None else []
        created = self._created
        return [Model(id=name, created=created, **describe(name)) for name in own] + [
            Model(id=name, created=created) for name in others if name not in own
        ]

    async def describe_workers(self) -> bytes:
        """Return the table that `fairlead status` shows, as JSON. Other work runs in between."""
        workers: list[msgspec.Raw] = []
        for slice in slices(self.table):
            workers += (msgspec.Raw(msgspec.json.encode(_describe(worker))) for worker in slice)
            await asyncio.sleep(0)
        known: dict[str, Any] = {
            "service": self.config.service_name,
            "policy": self.config.policy,
            "index": "unused",
            "index_reason": "",
            "index_read": "",
        }
        if isinstance(self.policy, PrefixAware):
            known |= {"index": self.policy.index, "index_reason": self.policy.index_reason, "index_read": self.policy.read_mode}
            known["ignored_records"] = self.policy.trust.recent()
        return msgspec.json.encode({**known, "workers": workers})


def _describe(worker: Worker) -> dict[str, Any]:
    return {
        "pod": worker.pod,
        "address": worker.address,
        "ready": worker.ready and not worker.silent,
        "draining": worker.draining,
        "usable": worker.usable,
        "reason": "silent" if worker.silent else worker.reason,
        "in_flight": worker.in_flight,
        "incarnation": worker.incarnation,
        "canary": worker.canary,
        "fallback": worker.fallback,
        "load": worker.load,
        "prediction": worker.prediction_error.to_dict(),
    }
