"""A client of the API server with administrator rights: requests and watches over one connection pool."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from tests.operator.support.apiserver import TOKEN, ApiServer

MERGE = "application/merge-patch+json"
SERVICES = "/apis/fairlead.dev/v1alpha1/namespaces/default/inferenceservices"
DEPLOYMENTS = "/apis/apps/v1/namespaces/default/deployments"
PODS = "/api/v1/namespaces/default/pods"
OURS = "labelSelector=app.kubernetes.io%2Fmanaged-by%3Dfairlead"


class Api:
    def __init__(self, server: ApiServer, session: aiohttp.ClientSession) -> None:
        self._url, self._session = server.url, session

    @staticmethod
    def session() -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "application/json"}
        connector = aiohttp.TCPConnector(ssl=False, limit=64)
        return aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout(None), read_bufsize=2**22)

    async def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Return the answer, or None for 404 and 409. Raises RuntimeError for other errors."""
        data = None if body is None else json.dumps(body).encode()
        async with self._session.request(method, self._url + path, data=data, headers={"Content-Type": content_type}) as answer:
            text = await answer.read()
            if answer.status in (404, 409):
                return None
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {text[:300].decode()}")
            return json.loads(text)

    async def list(self, path: str) -> Any:
        """Return every object of a path that has our label, and the list's metadata."""
        return await self.request("GET", f"{path}?{OURS}")

    async def patch(self, path: str, patch: Any) -> Any:
        return await self.request("PATCH", path, patch, MERGE)

    async def watch(self, path: str, version: str) -> AsyncIterator[tuple[str, Any]]:
        """Yield (type, object) of every event after `version`, until cancelled."""
        url = f"{self._url}{path}?watch=true&resourceVersion={version}&{OURS}"
        async with self._session.get(url) as answer:
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"]
