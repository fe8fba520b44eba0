"""Polls routers for their demand (`POST /fairlead/demand`), thousands at a time: a long poll may last a minute."""

from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from fairlead_operator.scaling.demand import RouterReport

MARGIN = 10.0  # seconds beyond the requested wait
MAX_BYTES = 4 << 20  # bytes of an answer: 1,000 workers are 0.4 MB


class DemandUnavailable(Exception):
    """A router has not reported its demand; the message says what came instead."""


class DemandClient:
    """One HTTP client for all services, with one connection per poll."""

    def __init__(self, base_url: str = "") -> None:
        self._base_url = base_url
        self._http: aiohttp.ClientSession | None = None

    async def fetch(self, address: str, wait: float, hint: Mapping[str, Any], *, with_unique_shares: bool = False) -> RouterReport:
        """Return the report of the router at `address` (host:port), which answers when it has requests, at the latest after `wait` seconds.

        `hint`: the scale-up's progress, which the router reports to waiting clients. `with_unique_shares`: include the share of each
        worker's cache that no other worker holds. Raises DemandUnavailable.
        """
        if self._http is None:  # not before there is an event loop
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False, read_bufsize=4096)
        url = f"{self._base_url or f'http://{address}'}/fairlead/demand"
        query = {
            **{name: str(value) for name, value in hint.items()},
            "wait": f"{wait:.1f}",
            **({"unique_shares": "1"} if with_unique_shares else {}),
        }
        timeout = aiohttp.ClientTimeout(total=wait + MARGIN, sock_connect=5.0)
        try:
            async with self._http.post(url, params=query, timeout=timeout) as answer:
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}")
                if (answer.content_length or 0) > MAX_BYTES:
                    raise ValueError(f"{answer.content_length} bytes")
                return msgspec.json.decode(await answer.read(), type=RouterReport)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DemandUnavailable(f"{url}: {type(error).__name__}: {error}") from None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
