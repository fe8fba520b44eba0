"""What the operator asks of routers and workers: the proof that a service serves (one completion of one token, through the router's
Service, as a client would ask for it), what one router sees, how a canary fares, and of workers that load how far they are.
"""

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec

from fairlead_index.split import SplitReport
from fairlead_operator.api import InferenceService
from fairlead_operator.loading_status import LoadingSeen
from fairlead_operator.reconcile.demand_client import DemandClient

TIMEOUT = 60.0  # seconds; a worker on a slow CPU under full load still answers one token in this time
PROMPT = "Ready?"
LOOK_TIMEOUT = 5.0  # seconds; nothing waits for it


class RouterSilent(Exception):
    """A router did not say what it sees; the message says what came instead."""


class Prober:
    """One HTTP client for all services. Reaches them by DNS names of the cluster: in tests `base_url` says where they are instead."""

    def __init__(self, cluster_domain: str, base_url: str = "") -> None:
        self._domain = cluster_domain
        self._base_url = base_url
        self.demand = DemandClient(base_url)
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(TIMEOUT, connect=5.0), trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()
        await self.demand.close()

    async def complete(self, service: InferenceService) -> str:
        """Empty when a completion came back, otherwise what went wrong."""
        base = self._base_url or f"http://{service.name}.{service.namespace}.svc.{self._domain}"
        keyed = service.spec.access is not None  # the operator has no key: the router makes the completion itself
        url = f"{base}/fairlead/probe" if keyed else f"{base}/v1/completions"
        asked = {"model": service.served_model_name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        try:
            # A new connection each time: kube-proxy chooses among the routers that exist now.
            once = {"Connection": "close"}
            answer = await (self._http.get(url, headers=once) if keyed else self._http.post(url, json=asked, headers=once))
            if answer.status_code != 200:
                return f"{url} answered {answer.status_code}: {answer.text[:300]}"
            choices = answer.json()["choices"]
        except httpx.HTTPError as error:
            return f"{url}: {type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError):
            return f"{url} answered 200 without choices: {answer.text[:300]}"
        return "" if choices else f"{url} answered 200 with no choice"

    async def loading(self, address: str) -> LoadingSeen | None:
        """How far the worker at `address` (host:port) is; None when it does not say."""
        try:
            answer = await self._http.get(
                f"{self._base_url or f'http://{address}'}/ready", headers={"Connection": "close"}, timeout=LOOK_TIMEOUT
            )
            return LoadingSeen.of(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, AttributeError):
            return None

    async def page(self, address: str) -> Mapping[str, Any]:
        """What the router at `address` (host:port) says of itself and of all workers. Raises RouterSilent."""
        url = f"{self._base_url or f'http://{address}'}/fairlead/workers"
        try:
            answer = await self._http.get(url, headers={"Connection": "close"}, timeout=LOOK_TIMEOUT)
            answer.raise_for_status()
            page = answer.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise RouterSilent(f"{url}: {type(error).__name__}: {error}") from None
        if not isinstance(page, dict) or not isinstance(page.get("workers"), list):
            raise RouterSilent(f"{url}: not a router's answer")
        return page

    async def split(self, address: str) -> SplitReport:
        """How a canary and the others fare at the router at `address` (host:port). Raises RouterSilent."""
        url = f"{self._base_url or f'http://{address}'}/fairlead/split"
        try:
            answer = await self._http.get(url, headers={"Connection": "close"}, timeout=LOOK_TIMEOUT)
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=SplitReport)
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
            raise RouterSilent(f"{url}: {type(error).__name__}: {error}") from None
