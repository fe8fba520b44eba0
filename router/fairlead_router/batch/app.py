"""HTTP paths of the Batch API, for the routers. They authenticate clients and name the tenant in a header."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from fairlead_common.http.head import find_fault
from fairlead_common.http.origins import FOREIGN
from fairlead_router.batch.metrics import BatchMetrics
from fairlead_router.batch.records import BatchRecord, new_id
from fairlead_router.batch.requests import choose_page, lifetime_seconds, parse_batch, window_seconds
from fairlead_router.batch.runner import Runner
from fairlead_router.batch.storage.base import StorageConflict, StorageError
from fairlead_router.batch.store import Store
from fairlead_router.batch.uploads import Uploads
from fairlead_router.errors import ApiError, unavailable
from fairlead_router.tenancy.shared_secret import TENANT_HEADER, SharedSecret
from fairlead_router.tenancy.tenants import read_credential

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 10
LINGER_BYTES, LINGER_SECONDS = 256 << 20, 5.0
"""Limits for discarding a refused upload: a client that still sends would see a reset instead of the answer."""
MAX_BODY_BYTES: Final = 1 << 20
MAX_FILES, MAX_BATCHES = 10_000, 100
"""Most objects of one page."""
_PUBLIC = frozenset(("/health", "/ready", "/metrics"))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BatchApp:
    """Handlers of all paths."""

    def __init__(self, store: Store, runner: Runner, secret: SharedSecret, metrics: BatchMetrics, on_conflict: Callable[[], None]) -> None:
        self._store, self._runner, self._secret, self._metrics, self._on_conflict = store, runner, secret, metrics, on_conflict
        self._uploads = Uploads(store)

    def create(self) -> web.Application:
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", _health)
        app.router.add_get("/ready", _health)
        app.router.add_get("/metrics", self._show_metrics)
        app.router.add_post("/v1/files", self._upload)
        app.router.add_get("/v1/files", self._list_files)
        app.router.add_get("/v1/files/{id}", self._show_file)
        app.router.add_delete("/v1/files/{id}", self._delete_file)
        app.router.add_get("/v1/files/{id}/content", self._send_content)
        app.router.add_post("/v1/batches", self._create_batch)
        app.router.add_get("/v1/batches", self._list_batches)
        app.router.add_get("/v1/batches/{id}", self._show_batch)
        app.router.add_post("/v1/batches/{id}/cancel", self._cancel_batch)
        return app

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            headers = [(name.lower(), value) for name, value in request.raw_headers]
            if fault := find_fault(f"{request.version.major}.{request.version.minor}", headers):
                raise ApiError(400, fault, code="bad_request")
            if request.method not in ("GET", "HEAD") and "origin" in request.headers:  # routers send none
                raise ApiError(403, FOREIGN, kind="permission_error", code="forbidden_origin")
            if request.path not in _PUBLIC and self._secret.is_required:
                credential = read_credential([(b"authorization", request.headers.get("authorization", "").encode())])
                if not self._secret.matches(credential):
                    raise ApiError(401, "Only the routers of the service may connect here.", code="invalid_api_key")
            response = await handler(request)
            if not response.prepared and request.path not in _PUBLIC:  # anybody may send those with the name of a tenant
                response.headers.update(self._runner.unpaid_cpu.take(_tenant(request)))
            return response
        except ApiError as error:
            await _discard_body(request)
            return _json_response(error.status, error.body, [(name.decode(), value.decode()) for name, value in error.headers])
        except web.HTTPException as error:
            await _discard_body(request)
            body = ApiError(error.status, f"{request.method} {request.path}: {error.reason}.", code="not_found").body
            return _json_response(error.status, body)
        except StorageError as error:
            if isinstance(error, StorageConflict):
                self._on_conflict()
            logger.warning("%s %s: %s", request.method, request.path, error)
            await _discard_body(request)
            refusal = unavailable("The storage of the Batch API cannot be used now. Try again in 5 s.", retry_after=5)
            return _json_response(refusal.status, refusal.body, [("retry-after", "5")])

    # Files

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        return _object_response((await self._uploads.receive(_tenant(request), request)).to_object())

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        began, tenant = time.thread_time(), _tenant(request)
        files = self._store.files_of(tenant)
        if purpose := request.query.get("purpose"):
            files = [file for file in files if file.purpose == purpose]
        page, has_more = choose_page(files, request.query, MAX_FILES, MAX_FILES)
        response = _list_response([file.to_object() for file in page], has_more)
        self._runner.unpaid_cpu.add(tenant, time.thread_time() - began)
        return response

    async def _show_file(self, request: web.Request) -> web.StreamResponse:
        return _object_response(self._store.file(_tenant(request), request.match_info["id"]).to_object())

    async def _delete_file(self, request: web.Request) -> web.StreamResponse:
        file = self._store.file(_tenant(request), request.match_info["id"])
        await self._store.delete_file(file)
        return _object_response({"id": file.id, "object": "file", "deleted": True})

    async def _send_content(self, request: web.Request) -> web.StreamResponse:
        file = self._store.file(_tenant(request), request.match_info["id"])
        name, at = f"files/{file.id}", 0
        piece = await self._store.storage.read(name, 0, PIECE_BYTES)  # before the head: its errors become an answer
        response = web.StreamResponse(headers={"content-type": "application/octet-stream", "content-length": str(file.bytes)})
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        try:
            while piece:
                await response.write(piece)
                at += len(piece)
                piece = await self._store.storage.read(name, at, min(PIECE_BYTES, file.bytes - at)) if at < file.bytes else b""
        except ConnectionError:  # the client has left
            return response
        except StorageError as error:  # an answer with the error would become part of the file
            logger.warning("%s: a download ends after %d of %d bytes: %s", file.id, at, file.bytes, error)
        if at < file.bytes and request.transport is not None:
            request.transport.close()  # the end of the connection tells the client
        return response

    # Batches

    async def _create_batch(self, request: web.Request) -> web.StreamResponse:
        tenant, new = _tenant(request), parse_batch(await request.read())
        lifetime = lifetime_seconds(new.output_expires_after, self._store.limits.retention, "output_expires_after")
        file = self._store.file(tenant, new.input_file_id)
        if file.purpose != "batch":
            raise ApiError(
                400,
                f"File {file.id} has purpose {file.purpose}; upload the input with purpose batch.",
                param="input_file_id",
                code="invalid",
            )
        self._store.check_counts(tenant)
        self._store.check_space(tenant)
        now = int(time.time())
        batch = BatchRecord(
            id=new_id("batch_"),
            tenant=tenant,
            endpoint=new.endpoint,
            input_file_id=file.id,
            completion_window=new.completion_window,
            created_at=now,
            expires_at=now + window_seconds(new.completion_window),
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            file_lifetime=lifetime,
            metadata=new.metadata,
        )
        await self._store.add_batch(batch)
        self._runner.start(batch.id)
        return self._batch_response(batch)

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        began, tenant = time.thread_time(), _tenant(request)
        page, has_more = choose_page(self._store.batches_of(tenant), request.query, 20, MAX_BATCHES)
        response = _list_response([batch.to_object(*self._runner.counts(batch)) for batch in page], has_more)
        self._runner.unpaid_cpu.add(tenant, time.thread_time() - began)
        return response

    async def _show_batch(self, request: web.Request) -> web.StreamResponse:
        return self._batch_response(self._store.batch(_tenant(request), request.match_info["id"]))

    async def _cancel_batch(self, request: web.Request) -> web.StreamResponse:
        batch = self._store.batch(_tenant(request), request.match_info["id"])
        changes: dict[str, Any] = {"status": "cancelling", "cancelling_at": int(time.time())}
        changed = await self._store.change_batch(batch.id, ("validating", "in_progress"), **changes)
        if changed is None and (batch := self._store.batches[batch.id]).status != "cancelling":
            raise ApiError(400, f"Batch {batch.id} is {batch.status}: only unfinished batches can be cancelled.", code="invalid_status")
        self._runner.cancel(batch.id)
        return self._batch_response(changed or batch)

    def _batch_response(self, batch: BatchRecord) -> web.Response:
        return _object_response(batch.to_object(*self._runner.counts(batch)))

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        self._metrics.unfinished.set(len(self._store.unfinished()))
        self._metrics.stored_bytes.set(sum(self._store.file_bytes.values()) + sum(self._store.log_bytes.values()))
        return web.Response(body=self._metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})


def _tenant(request: web.Request) -> str:
    return request.headers.get(TENANT_HEADER, "")


async def _health(request: web.Request) -> web.StreamResponse:
    return _json_response(200, b'{"status":"ok"}')


async def _discard_body(request: web.Request) -> None:
    """Discard a bounded part of a refused body."""
    discarded = 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while discarded < LINGER_BYTES and (piece := await request.content.readany()):
                discarded += len(piece)
    except (TimeoutError, web.RequestPayloadError, ConnectionError):
        return


def _json_response(status: int, body: bytes, headers: list[tuple[str, str]] | None = None) -> web.Response:
    return web.Response(status=status, body=body, headers=dict([("content-type", "application/json"), *(headers or [])]))


def _object_response(value: dict[str, Any]) -> web.Response:
    return _json_response(200, msgspec.json.encode(value))


def _list_response(data: list[dict[str, Any]], has_more: bool) -> web.Response:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return _object_response({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})
