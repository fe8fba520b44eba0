"""What the operator asks of routers: the proof that a service serves (one completion of one token, through the router's Service, as a
client would ask for it), and what one router sees of the index.
"""

from collections.abc import Mapping
from typing import Any

import httpx

from fairlead_operator.api import InferenceService
from fairlead_operator.observed import IndexSeen
from fairlead_operator.reconcile.demand_client import DemandClient

TIMEOUT = 60.0  # seconds; a worker on a slow CPU under full load still answers one token in this time
PROMPT = "Ready?"
LOOK_TIMEOUT = 5.0  # seconds; nothing waits for it
ANSWERS = 16  # of one worker, by which the router itself judges the index
_STATES = {"ok": "Ok", "unavailable": "Unavailable", "off": "Off", "unused": "Unused"}


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

    async def index(self, address: str) -> IndexSeen:
        """The index as the router at `address` (host:port) sees it. Raises RouterSilent."""
        url = f"{self._base_url or f'http://{address}'}/fairlead/workers"
        try:
            answer = await self._http.get(url, headers={"Connection": "close"}, timeout=LOOK_TIMEOUT)
            answer.raise_for_status()
            return _index_of(answer.json())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RouterSilent(f"{url}: {type(error).__name__}: {error}") from None


def _index_of(page: Mapping[str, Any]) -> IndexSeen:
    wrong = [one["prediction"] for one in page["workers"] if (one.get("prediction") or {}).get("answers", 0) >= ANSWERS]
    return IndexSeen(
        state=_STATES.get(page["index"], "Unknown"),
        reason=str(page.get("index_reason") or ""),
        read={"mirror": "Mirror", "remote": "Remote"}.get(page.get("index_read") or "", ""),
        error_percent=max((min(100, round(100 * max(one["over"], one["under"]))) for one in wrong), default=None),
    )
