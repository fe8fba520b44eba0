"""What the operator asks of routers and workers: the proof that a service serves (one completion of one token, through the router's
Service, as a client would ask for it), what one router sees, how a canary fares, and of workers that load how far they are.

Routers that do not answer must cost nothing but a wait: only so many requests are open at a time, and the others stand in line.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec

from fairlead_common.canary_split import SplitReport
from fairlead_common.protocols.paths import EMBEDDINGS, NO_GENERATION
from fairlead_operator.api import InferenceService
from fairlead_operator.observed import ObservedLoading
from fairlead_operator.polling.demand_client import DemandClient

TIMEOUT = 60.0  # seconds; a worker on a slow CPU under full load still answers one token in this time
CONNECT = 5.0  # seconds
PROMPT = "Ready?"
LOOK_TIMEOUT = 5.0  # seconds; nothing waits for it
MAX_COMPLETIONS, MAX_LOOKS = 256, 32  # requests that are open at the same time
Answer = TypeVar("Answer")
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


class RouterUnavailable(Exception):
    """A router did not say what it sees; the message says what came instead."""


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """The service that is to prove itself, in as little memory as a thousand of them may take that wait for routers which do not answer."""

    namespace: str
    name: str
    model: str  # as clients call it
    requires_key: bool  # its routers ask for a key
    router: str = ""  # the admin address (host:port) of a ready one; empty: none is ready

    @classmethod
    def of(cls, service: InferenceService, router: str = "") -> "ProbeTarget":
        return cls(service.namespace, service.name, service.served_model_name, service.spec.access is not None, router)


class Prober:
    """One HTTP client for all services. Reaches them by DNS names of the cluster: in tests `base_url` says where they are instead."""

    def __init__(self, cluster_domain: str, base_url: str = "") -> None:
        self._domain = cluster_domain
        self._base_url = base_url
        self.demand = DemandClient(base_url)
        self._session: aiohttp.ClientSession | None = None
        self._completions, self._looks = asyncio.Semaphore(MAX_COMPLETIONS), asyncio.Semaphore(MAX_LOOKS)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self.demand.close()

    async def complete(self, asked: ProbeTarget) -> str:
        """Empty when a completion came back, otherwise what went wrong."""
        base = self._base_url or f"http://{asked.name}.{asked.namespace}.svc.{self._domain}"
        url = f"{base}/v1/completions"
        try:
            async with self._completions:
                if asked.requires_key:
                    # The operator has no key: a router makes the completion itself, and the Service is asked whether it leads to one.
                    url = f"{base}/health"
                    status, text = await self._ask("GET", url, None, LOOK_TIMEOUT)
                    if status == 200:
                        url = f"{self._base_url or f'http://{asked.router}'}/fairlead/probe"
                        status, text = await self._ask("GET", url, None, TIMEOUT)
                else:
                    body = {"model": asked.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
                    status, text = await self._ask("POST", url, body, TIMEOUT)
        except (*_FAILURES, ValueError) as error:
            return f"{url}: {type(error).__name__}: {error}"
        if status == 400 and NO_GENERATION in text:
            return await self._embed(f"{base}{EMBEDDINGS}", asked.model)
        if status != 200:
            return f"{url} answered {status}: {text[:300]}"
        try:
            answer = json.loads(text)
            choices = answer["data"] if answer.get("object") == "list" else answer["choices"]  # the router's own probe may embed
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{url} answered 200 without choices: {text[:300]}"
        return "" if choices else f"{url} answered 200 with no choice"

    async def _embed(self, url: str, model: str) -> str:
        """As `complete`, of a model that has no head."""
        try:
            async with self._completions:
                status, text = await self._ask("POST", url, {"model": model, "input": PROMPT}, TIMEOUT)
            return "" if status == 200 and json.loads(text)["data"] else f"{url} answered {status}: {text[:300]}"
        except (*_FAILURES, ValueError, KeyError, TypeError) as error:
            return f"{url}: {type(error).__name__}: {error}"

    async def loading(self, address: str) -> ObservedLoading | None:
        """How far the worker at `address` (host:port) is; None when it does not say."""
        try:
            _, text = await self._look(address, "/ready")
            return ObservedLoading.of(json.loads(text))
        except (*_FAILURES, ValueError, TypeError, AttributeError):
            return None

    async def page(self, address: str) -> Mapping[str, Any]:
        """What the router at `address` (host:port) says of itself and of all workers. Raises RouterSilent."""
        page = await self._said(address, "/fairlead/workers", dict[str, Any])
        if not isinstance(page.get("workers"), list):
            raise RouterUnavailable(f"{address}/fairlead/workers: not a router's answer")
        return page

    async def split(self, address: str) -> SplitReport:
        """How a canary and the others fare at the router at `address` (host:port). Raises RouterSilent."""
        return await self._said(address, "/fairlead/split", SplitReport)

    async def _said(self, address: str, path: str, kind: type[Answer]) -> Answer:
        try:
            status, text = await self._look(address, path)
            if status != 200:
                raise ValueError(f"answered {status}: {text[:300]}")
            return msgspec.json.decode(text, type=kind)
        except (*_FAILURES, ValueError) as error:
            raise RouterUnavailable(f"{address}{path}: {type(error).__name__}: {error}") from None

    async def _look(self, address: str, path: str) -> tuple[int, str]:
        async with self._looks:
            return await self._ask("GET", f"{self._base_url or f'http://{address}'}{path}", None, LOOK_TIMEOUT)

    async def _ask(self, method: str, url: str, body: Any, seconds: float) -> tuple[int, str]:
        """Status and text. A new connection each time: kube-proxy chooses among the routers that exist now."""
        if self._session is None:  # made inside the event loop, as aiohttp wants it
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        async with self._session.request(method, url, json=body, timeout=timeout, allow_redirects=False) as answer:
            return answer.status, await answer.text(errors="replace")
