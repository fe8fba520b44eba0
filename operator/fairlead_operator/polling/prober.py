"""Requests to routers and workers: the probe, a router's view, a canary's results, and a worker's loading progress.

The probe proves that a service serves: one completion of one token through the router's Service, as a client would request it. Routers that
do not answer must cost nothing but a wait: only a bounded number of requests is open at a time, and the others queue.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from fairlead_common.canary_split import SplitReport
from fairlead_common.protocols.paths import CLASSIFICATIONS, EMBEDDINGS, NO_EMBEDDINGS, NO_GENERATION
from fairlead_operator import names
from fairlead_operator.api import InferenceService
from fairlead_operator.observed import ObservedLoading
from fairlead_operator.polling.demand_client import DemandClient

TIMEOUT = 60.0  # seconds; a worker on a slow CPU under full load still answers one token within it
CONNECT = 5.0  # seconds
PROMPT = "Ready?"
POLL_TIMEOUT = 5.0  # seconds; nothing depends on the answer
MAX_COMPLETIONS, MAX_POLLS = 256, 32  # concurrent requests
Answer = TypeVar("Answer")
REQUESTS = "fairlead_router_requests_total"
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


class RouterUnavailable(Exception):
    """A router did not report what was requested; the message says what came instead."""


@dataclass(frozen=True)
class RequestCounts:
    """Requests of clients since a router's start, and those that got a status 5xx."""

    requests: int
    errors: int


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The service to probe. Small, because a thousand may wait for routers that do not answer."""

    namespace: str
    name: str
    model: str  # the name that clients use
    requires_key: bool  # its routers require an API key
    scheme: str = "http"  # https: the certificate is not verified, as in the kubelet's probes
    router: str = ""  # admin address (host:port) of a ready router; empty: none is ready

    @classmethod
    def of(cls, service: InferenceService, router: str = "") -> "ProbeTarget":
        return cls(
            service.namespace, service.name, service.served_model_name, service.spec.access is not None, names.scheme(service), router
        )


class Prober:
    """One HTTP client for all services. Uses the cluster's DNS names; in tests `base_url` replaces them."""

    def __init__(self, cluster_domain: str, base_url: str = "") -> None:
        self._domain = cluster_domain
        self._base_url = base_url
        self.demand = DemandClient(base_url)
        self._session: aiohttp.ClientSession | None = None
        self._completions, self._polls = asyncio.Semaphore(MAX_COMPLETIONS), asyncio.Semaphore(MAX_POLLS)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self.demand.close()

    async def complete(self, target: ProbeTarget) -> str:
        """Request one token. Returns an empty string after a completion, and otherwise the error."""
        base = self._base_url or f"{target.scheme}://{target.name}.{target.namespace}.svc.{self._domain}"
        url = f"{base}/v1/completions"
        try:
            async with self._completions:
                if target.requires_key:
                    # The operator has no key: a router sends the completion itself. /health shows whether the Service leads to a router.
                    url = f"{base}/health"
                    status, text = await self._request("GET", url, None, POLL_TIMEOUT)
                    if status == 200:
                        url = f"{self._base_url or f'http://{target.router}'}/fairlead/probe"
                        status, text = await self._request("GET", url, None, TIMEOUT)
                else:
                    body = {"model": target.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
                    status, text = await self._request("POST", url, body, TIMEOUT)
        except (*_FAILURES, ValueError) as error:
            return f"{url}: {type(error).__name__}: {error}"
        if status == 400 and NO_GENERATION in text:
            return await self._embed(base, target.model)
        if status != 200:
            return f"{url} answered {status}: {text[:300]}"
        try:
            answer = json.loads(text)
            choices = answer["data"] if answer.get("object") == "list" else answer["choices"]  # the router's own probe may embed
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{url} answered 200 without choices: {text[:300]}"
        return "" if choices else f"{url} answered 200 with no choice"

    async def _embed(self, base: str, model: str) -> str:
        """Probe a model that generates nothing by an embedding, or a classifier by a class. Returns as `complete` does."""
        url, body = f"{base}{EMBEDDINGS}", {"model": model, "input": PROMPT}
        try:
            async with self._completions:
                status, text = await self._request("POST", url, body, TIMEOUT)
                if status == 400 and NO_EMBEDDINGS in text:
                    url = f"{base}{CLASSIFICATIONS[0]}"
                    status, text = await self._request("POST", url, body, TIMEOUT)
            return "" if status == 200 and json.loads(text)["data"] else f"{url} answered {status}: {text[:300]}"
        except (*_FAILURES, ValueError, KeyError, TypeError) as error:
            return f"{url}: {type(error).__name__}: {error}"

    async def fetch_loading(self, address: str) -> ObservedLoading | None:
        """Return the loading progress of the worker at `address` (host:port); None when it does not report any."""
        try:
            _, text = await self._get(address, "/ready")
            return ObservedLoading.parse(json.loads(text))
        except (*_FAILURES, ValueError, TypeError, AttributeError):
            return None

    async def fetch_workers(self, address: str) -> Mapping[str, Any]:
        """Return what the router at `address` (host:port) reports about itself and all workers. Raises RouterUnavailable."""
        page = await self._fetch(address, "/fairlead/workers", dict[str, Any])
        if not isinstance(page.get("workers"), list):
            raise RouterUnavailable(f"{address}/fairlead/workers: not a router's answer")
        return page

    async def fetch_split(self, address: str) -> SplitReport:
        """Return the results of both sides of a split from the router at `address` (host:port). Raises RouterUnavailable."""
        return await self._fetch(address, "/fairlead/split", SplitReport)

    async def fetch_request_counts(self, address: str) -> RequestCounts:
        """Return the requests that the router at `address` (host:port) has counted in its metrics. Raises RouterUnavailable."""
        try:
            status, text = await self._get(address, "/metrics")
            if status != 200:
                raise ValueError(f"answered {status}: {text[:300]}")
            samples = [one for family in text_string_to_metric_families(text) for one in family.samples if one.name == REQUESTS]
        except (*_FAILURES, ValueError) as error:
            raise RouterUnavailable(f"{address}/metrics: {type(error).__name__}: {error}") from None
        failed = sum(one.value for one in samples if one.labels.get("code", "").startswith("5"))
        return RequestCounts(int(sum(one.value for one in samples)), int(failed))

    async def _fetch(self, address: str, path: str, kind: type[Answer]) -> Answer:
        try:
            status, text = await self._get(address, path)
            if status != 200:
                raise ValueError(f"answered {status}: {text[:300]}")
            return msgspec.json.decode(text, type=kind)
        except (*_FAILURES, ValueError) as error:
            raise RouterUnavailable(f"{address}{path}: {type(error).__name__}: {error}") from None

    async def _get(self, address: str, path: str) -> tuple[int, str]:
        async with self._polls:
            return await self._request("GET", f"{self._base_url or f'http://{address}'}{path}", None, POLL_TIMEOUT)

    async def _request(self, method: str, url: str, body: Any, seconds: float) -> tuple[int, str]:
        """Return status and text. Each request opens a new connection, so that kube-proxy chooses among the present routers."""
        if self._session is None:  # aiohttp requires a running event loop
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        async with self._session.request(method, url, json=body, timeout=timeout, allow_redirects=False, ssl=False) as answer:
            return answer.status, await answer.text(errors="replace")
