"""What the operator asks of routers: the proof that a service serves (one completion of one token, through the router's Service, as a
client would ask for it), and what one router sees of the index.

Routers that do not answer must cost nothing but a wait: only so many requests are open at a time, and the others stand in line.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from fairlead_operator.api import InferenceService
from fairlead_operator.observed import IndexSeen

TIMEOUT = 60.0  # seconds; a worker on a slow CPU under full load still answers one token in this time
CONNECT = 5.0  # seconds
PROMPT = "Ready?"
LOOK_TIMEOUT = 5.0  # seconds; nothing waits for it
COMPLETIONS, LOOKS = 256, 32  # requests that are open at the same time
ANSWERS = 16  # of one worker, by which the router itself judges the index
_STATES = {"ok": "Ok", "unavailable": "Unavailable", "off": "Off", "unused": "Unused"}
_FAILURES = (aiohttp.ClientError, OSError, TimeoutError)


class RouterSilent(Exception):
    """A router did not say what it sees; the message says what came instead."""


class Prober:
    """One HTTP client for all services. Reaches them by DNS names of the cluster: in tests `base_url` says where they are instead."""

    def __init__(self, cluster_domain: str, base_url: str = "") -> None:
        self._domain = cluster_domain
        self._base_url = base_url
        self._session: aiohttp.ClientSession | None = None
        self._completions, self._looks = asyncio.Semaphore(COMPLETIONS), asyncio.Semaphore(LOOKS)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def complete(self, service: InferenceService) -> str:
        """Empty when a completion came back, otherwise what went wrong."""
        base = self._base_url or f"http://{service.name}.{service.namespace}.svc.{self._domain}"
        keyed = service.spec.access is not None  # the operator has no key: the router makes the completion itself
        url = f"{base}/fairlead/probe" if keyed else f"{base}/v1/completions"
        asked = None if keyed else {"model": service.served_model_name, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
        try:
            async with self._completions:
                status, text = await self._ask("GET" if keyed else "POST", url, asked, TIMEOUT)
        except _FAILURES as error:
            return f"{url}: {type(error).__name__}: {error}"
        if status != 200:
            return f"{url} answered {status}: {text[:300]}"
        try:
            choices = json.loads(text)["choices"]
        except (ValueError, KeyError, TypeError):
            return f"{url} answered 200 without choices: {text[:300]}"
        return "" if choices else f"{url} answered 200 with no choice"

    async def index(self, address: str) -> IndexSeen:
        """The index as the router at `address` (host:port) sees it. Raises RouterSilent."""
        url = f"{self._base_url or f'http://{address}'}/fairlead/workers"
        try:
            async with self._looks:
                status, text = await self._ask("GET", url, None, LOOK_TIMEOUT)
            if status != 200:
                raise ValueError(f"answered {status}: {text[:300]}")
            return _index_of(json.loads(text))
        except (*_FAILURES, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RouterSilent(f"{url}: {type(error).__name__}: {error}") from None

    async def _ask(self, method: str, url: str, body: Any, seconds: float) -> tuple[int, str]:
        """Status and text. A new connection each time: kube-proxy chooses among the routers that exist now."""
        if self._session is None:  # made inside the event loop, as aiohttp wants it
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT)
        async with self._session.request(method, url, json=body, timeout=timeout, allow_redirects=False) as answer:
            return answer.status, await answer.text(errors="replace")


def _index_of(page: Mapping[str, Any]) -> IndexSeen:
    wrong = [one["prediction"] for one in page["workers"] if (one.get("prediction") or {}).get("answers", 0) >= ANSWERS]
    return IndexSeen(
        state=_STATES.get(page["index"], "Unknown"),
        reason=str(page.get("index_reason") or ""),
        read={"mirror": "Mirror", "remote": "Remote"}.get(page.get("index_read") or "", ""),
        error_percent=max((min(100, round(100 * max(one["over"], one["under"]))) for one in wrong), default=None),
    )
