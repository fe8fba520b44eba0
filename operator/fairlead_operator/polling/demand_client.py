"""Asks routers how much is asked of them (`GET /fairlead/demand`), thousands at a time: a question may wait a minute for its answer."""

from collections.abc import Mapping
from typing import Any

import aiohttp

from fairlead_operator.scaling.demand import RouterReport

MARGIN = 10.0  # seconds beyond the wait that was asked for
MAX_BYTES = 4 << 20  # bytes of an answer: 1,000 workers are 0.4 MB


class DemandUnavailable(Exception):
    """A router has not said what is asked of it; the message says what came instead."""


class DemandClient:
    """One pool for all services, a connection for each question."""

    def __init__(self, base_url: str = "") -> None:
        self._base_url = base_url
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, address: str, wait: float, hint: Mapping[str, Any], *, worth: bool = False) -> RouterReport:
        """The router at `address` (host:port), which answers when somebody asks something of it, at the latest after `wait` seconds.

        `hint`: what it may tell those that wait for a worker; `worth`: with what caches are worth. Raises RouterDeaf.
        """
        if self._http is None:  # not before there is a loop
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=4096)
        url = f"{self._base_url or f'http://{address}'}/fairlead/demand"
        query = {**{name: str(value) for name, value in hint.items()}, "wait": f"{wait:.1f}", **({"worth": "1"} if worth else {})}
        timeout = aiohttp.ClientTimeout(total=wait + MARGIN, sock_connect=5.0)
        try:
            async with self._http.get(url, params=query, timeout=timeout) as answer:
                if answer.status != 200:
                    raise DemandUnavailable(f"{url} answered {answer.status}")
                if (answer.content_length or 0) > MAX_BYTES:
                    raise DemandUnavailable(f"{url} answered {answer.content_length} bytes")
                return RouterReport.of(await answer.json(content_type=None))
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DemandUnavailable(f"{url}: {type(error).__name__}: {error}") from None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
