"""The Kubernetes API with dicts in and dicts out, over one connection pool of `kubernetes.aio`."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client as aio
from kubernetes.aio import config as aio_config

from fairlead_operator.kube.kinds import UNLABELLED, Kind, path_of
from fairlead_operator.kube.tracing import resource_of, trace_part
from fairlead_operator.names import FIELD_MANAGER, MANAGED_BY

Body = dict[str, Any]
OnResponse = Callable[[str, int], None]  # method, HTTP status
PAGE = 100  # objects of one list request: the memory of a page is not given back to the system
TIMEOUT = 30.0  # seconds for one request
WATCH_SECONDS = 300  # seconds of one watch request
WATCH_IDLE_TIMEOUT = 150.0  # seconds without a byte on a watch, after which it counts as dead
BUFFER = 1 << 16  # bytes; twice as many are buffered per response. The client's own 2 MiB would take 32 MiB over eight watches
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def own_namespace(otherwise: str) -> str:
    """Return the namespace of this process' pod; outside a cluster `otherwise`, or "default"."""
    try:
        return (_ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return otherwise or "default"


class ApiError(Exception):
    """An error response of the API server. `code` is the HTTP status, the text its message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def permanent(self) -> bool:
        """Return whether the same request would be refused again: the request is wrong, or the operator lacks the right."""
        return self.code in (400, 403, 404, 415, 422) or (self.code == 500 and "failed to create typed patch object" in str(self))


class Cluster:
    """Reads and writes of the operator. Raises ApiError for a response that is not 2xx; errors of the transport pass through."""

    def __init__(self, api: aio.ApiClient, authorize_write: Callable[[], float], on_response: OnResponse) -> None:
        """`authorize_write` is called before each write and returns the seconds that it may take. `on_response` is called per response."""
        self._api = api
        self._authorize_write = authorize_write
        self._on_response = on_response

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        kubeconfig: str = "",
        authorize_write: Callable[[], float] = lambda: TIMEOUT,
        on_response: OnResponse = lambda method, code: None,
    ) -> "AsyncIterator[Cluster]":
        """Connect with the pod's service account, or with a kubeconfig (the given one, $KUBECONFIG, ~/.kube/config).

        `authorize_write` is called when a write starts, and again when its connection is open and its first byte is about to be sent.
        """
        configuration = aio.Configuration(
            trace_configs=[_check_before_send(authorize_write)], client_session_kwargs={"read_bufsize": BUFFER}
        )
        if not kubeconfig and (_ACCOUNT / "token").exists():
            aio_config.load_incluster_config(client_configuration=configuration)
        else:
            await aio_config.load_kube_config(config_file=kubeconfig or None, client_configuration=configuration)
        async with aio.ApiClient(configuration) as api:
            yield cls(api, authorize_write, on_response)

    async def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        try:
            return await self._request("GET", kind.path(namespace, name))
        except ApiError as refusal:
            if refusal.code == 404:
                return None
            raise

    async def pages(self, kind: Kind, namespace: str = "", *, labelled: bool = True) -> AsyncGenerator[tuple[list[Body], int], None]:
        """Yield all objects of a kind (by default only those with our label) page by page, and the list's resourceVersion."""
        more = ""
        while True:
            query = [("limit", str(PAGE)), *_selector(labelled), *([("continue", more)] if more else [])]
            page = await self._request("GET", kind.path(namespace), query)
            yield [with_type(kind, item) for item in page["items"]], int(page["metadata"]["resourceVersion"])
            more = page["metadata"].get("continue") or ""
            if not more:
                return

    async def watch(self, kind: Kind, namespace: str, version: int) -> AsyncGenerator[tuple[str, Body], None]:
        """Yield the changes after `version` to objects with our label, or that users write: (ADDED, MODIFIED, DELETED or BOOKMARK; object).

        Returns when the API server ends the request, after WATCH_SECONDS. Raises ApiError(410) when `version` is too old, and TimeoutError
        when not even a bookmark (one a minute) arrives for WATCH_IDLE_TIMEOUT seconds.
        """
        query = [
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", str(version)),
            ("timeoutSeconds", str(WATCH_SECONDS)),
        ]
        query += _selector(kind not in UNLABELLED)
        response = await self._send("GET", kind.path(namespace), query, timeout=WATCH_SECONDS + WATCH_IDLE_TIMEOUT)
        try:
            if response.status > 299:
                raise ApiError(response.status, _message(await response.read()))
            rest = b""
            while True:
                async with asyncio.timeout(WATCH_IDLE_TIMEOUT):
                    chunk = await response.content.readany()
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        raise ApiError(int(event["object"].get("code") or 500), str(event["object"].get("message")))
                    yield event["type"], with_type(kind, event["object"])
        finally:
            response.close()

    async def resources(self, api_version: str) -> list[Body]:
        """Return the resources that the API server serves for a group and version. Raises ApiError(404) when it serves none."""
        return list((await self._request("GET", f"/apis/{api_version}"))["resources"])

    async def apply(self, body: Mapping[str, Any]) -> Body:
        """Apply exactly these fields (server-side apply). Forced: we own the fields that we send, even after other writers."""
        query = [("fieldManager", FIELD_MANAGER), ("force", "true"), ("fieldValidation", "Strict")]
        return await self._request("PATCH", path_of(body), query, body, "application/apply-patch+yaml")

    async def patch_status(self, body: Mapping[str, Any], status: Mapping[str, Any]) -> Body:
        """Write the status if the object is still the version that was read (409 otherwise), so that two writers cannot mix their views."""
        metadata = body["metadata"]
        patch = {"metadata": {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}, "status": status}
        return await self._merge(path_of(body, "status"), patch)

    async def annotate(self, body: Mapping[str, Any], annotations: Mapping[str, str]) -> Body:
        """Set annotations on the object of this uid. Raises ApiError 404 or 409 when it is gone."""
        return await self._merge(path_of(body), {"metadata": {"uid": body["metadata"]["uid"], "annotations": dict(annotations)}})

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Body:
        """Merge `patch` into the object, whatever version it has."""
        return await self._merge(kind.path(namespace, name), patch)

    async def _merge(self, path: str, patch: Mapping[str, Any]) -> Body:
        return await self._request("PATCH", path, [("fieldManager", FIELD_MANAGER)], patch, "application/merge-patch+json")

    async def create(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Create an object. Raises ApiError 409 when it exists."""
        return await self._request("POST", kind.path(body["metadata"]["namespace"]), [("fieldManager", FIELD_MANAGER)], body)

    async def replace(self, kind: Kind, body: Mapping[str, Any]) -> Body:
        """Replace the whole object if it is still the version that was read. Raises ApiError 409 otherwise."""
        path = kind.path(body["metadata"]["namespace"], body["metadata"]["name"])
        return await self._request("PUT", path, [("fieldManager", FIELD_MANAGER)], body)

    async def events_of(self, kind: str, namespace: str, name: str) -> list[Body]:
        """Return the Warning Events of one object, as core/v1 Events, at most a hundred."""
        fields = f"involvedObject.kind={kind},involvedObject.name={name},type=Warning"
        page = await self._request("GET", f"/api/v1/namespaces/{namespace}/events", [("fieldSelector", fields), ("limit", "100")])
        return list(page["items"])

    async def delete(self, body: Mapping[str, Any]) -> None:
        """Delete the object of this uid, not a successor of the same name."""
        options = {"preconditions": {"uid": body["metadata"]["uid"]}, "propagationPolicy": "Background"}
        await self._request("DELETE", path_of(body), body=options)

    async def _request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Body:
        timeout = TIMEOUT if method == "GET" else min(TIMEOUT, self._authorize_write())
        with trace_part(f"{method} {resource_of(path)}", "client") as span:
            response = await self._send(method, path, query, body, content_type, timeout)
            text = await response.read()
            self._on_response(method, response.status)
            span.set({"http.request.method": method, "url.path": path, "http.response.status_code": response.status})
            if 200 <= response.status <= 299:
                answer: Body = msgspec.json.decode(text)
                return answer
            raise ApiError(response.status, _message(text))

    async def _send(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        timeout: float = TIMEOUT,
    ) -> Any:
        """Return aiohttp's response, its body unread."""
        headers = {"Accept": "application/json", "Content-Type": content_type}
        request = await self._api.param_serialize(
            method, path, query_params=query or [], header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        return (await self._api.call_api(*request, _request_timeout=timeout)).response


def _check_before_send(authorize_write: Callable[[], float]) -> aiohttp.TraceConfig:
    """Return a trace that calls `authorize_write` right before a write is sent.

    A write may have waited for its connection (a free one, DNS, TCP, TLS), or be repeated on another one after the first was closed.
    Meanwhile the process may have been suspended. aiohttp sends the head of a request together with the first part of its body, and calls
    the trace right before, without yielding to the event loop in between. Every write has a body, and no read has one.
    """

    async def sending(*_: object) -> None:
        authorize_write()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(sending)
    return trace


def _selector(labelled: bool) -> list[tuple[str, str]]:
    return [("labelSelector", f"{MANAGED_BY}=fairlead")] if labelled else []


def with_type(kind: Kind, item: Mapping[str, Any]) -> Body:
    """Add apiVersion and kind, which the items of a list lack."""
    return {**item, "apiVersion": kind.api_version, "kind": kind.kind}


def _message(text: bytes) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500].decode(errors="replace") or "no message"
