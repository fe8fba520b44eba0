"""HTTP application: paths, errors, and one access log line for each request (without prompts, tokens or keys)."""

import asyncio
import importlib.metadata
import logging
import re
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Literal

import msgspec

from fairlead_common.canary_split import SplitReport
from fairlead_common.http.origins import FOREIGN, is_foreign_to_admin, parse_origins
from fairlead_common.protocols.model_list import ANTHROPIC_VERSION, to_anthropic_list, to_anthropic_model
from fairlead_common.protocols.paths import CHAT
from fairlead_common.telemetry.logs import bind_request
from fairlead_common.telemetry.spans import read_trace_id
from fairlead_common.telemetry.tracer import Tracer
from fairlead_common.truncate import quote, truncate
from fairlead_router import access_log
from fairlead_router.access_log import AccessLog
from fairlead_router.console.console import Console
from fairlead_router.console.console import serves as is_console_path
from fairlead_router.errors import SHUTTING_DOWN, ApiError, Headers, unavailable
from fairlead_router.interop import queries
from fairlead_router.interop.redirect import has_opted_out
from fairlead_router.interop.score_page import PATH as SCORE
from fairlead_router.request.client_request import Call, linger
from fairlead_router.request.prompts import PROMPTED, UNPROMPTED, Prompt
from fairlead_router.router import Router
from fairlead_router.serving.demand import PATH as DEMAND
from fairlead_router.serving.probe import PATH as PROBE
from fairlead_router.tenancy.tenants import ANONYMOUS
from fairlead_router.wire.client_connection import Request
from fairlead_router.wire.cors import Cors
from fairlead_router.wire.response import Reply

logger = logging.getLogger(__name__)

OPENAPI = "/openapi.json"
REFERENCE = frozenset((OPENAPI, "/docs"))
"""Proxied: the workers own the schema of requests."""
STORED = "/v1/responses/"
_STORED_PATH = re.compile(rf"{STORED}resp_[0-9a-z_]{{1,64}}(/input_items|/cancel)?")
"""Stored responses of workers. Ids have one spelling, so that every server reads the same path."""
MODELS, MODEL = "/v1/models", "/v1/models/"
ON_BOTH = frozenset(("/health", "/ready", "/version"))
ADMIN = frozenset(("/metrics", "/fairlead/workers", "/fairlead/split", SCORE, PROBE, DEMAND))
"""Paths that only `--admin-port` serves where that flag is given."""
_POSTED = frozenset((*PROMPTED, *UNPROMPTED, *queries.PATHS))
"""Paths of requests with a body."""
_PROMPTED, _QUERIES = frozenset(PROMPTED), frozenset((*queries.PATHS, SCORE))
Part = Literal["all", "inference", "admin"]


class App:
    """Callable that answers one request: `await app(request, reply)`. The connection cancels its task when the client disconnects."""

    def __init__(self, router: Router, part: Part = "all") -> None:
        """`part`: the paths that this port serves; all others are answered with 404."""
        self._router, self._part = router, part
        self._console = Console(router, shows_all_tenants=part == "admin") if router.config.console else None
        self._logs_json = router.config.log_format == "json"
        self._access = AccessLog(logging.getLogger(access_log.NAME), json=self._logs_json)
        origins = parse_origins(router.config.allowed_origins) if part != "admin" else ()
        self._cors = Cors(origins) if origins else None
        self._own_headers = (router.tracer.header_names if router.tracer else frozenset()) | ({b"origin"} if origins else frozenset())
        """Headers of the client that the worker does not get, because the router answers or replaces them."""
        self._pages: dict[str, Callable[[Reply], None]] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/fairlead/workers": self._workers,
            "/fairlead/split": self._split,
            MODELS: partial(self._models, False),
            "/version": self._version,
        }

    async def __call__(self, request: Request, reply: Reply) -> None:
        path = request.path
        if self._console is not None and is_console_path(path):  # before CORS: no other page may read it
            await self._console.answer(request, reply)
            return
        if path in ADMIN:
            if _is_foreign(request):
                reply.send(403, ApiError(403, FOREIGN, kind="permission_error", code="forbidden_origin").body)
                return
        elif self._cors is not None and self._cors.answer(request, reply):
            return
        handler, page = self._router.handler, self._pages.get(path)
        served = self._serves(path)
        if served and request.method in ("GET", "HEAD"):
            if path.startswith(MODEL) or path == MODELS:
                anthropic = any(name == ANTHROPIC_VERSION for name, _ in request.headers)
                page = partial(self._model, path.removeprefix(MODEL), anthropic) if path != MODELS else partial(self._models, anthropic)
            if page is not None and not (handler.keys.is_required and path.startswith("/v1/")):
                page(reply)
                return
            if path == PROBE:
                status, body = await self._router.probe.run()
                reply.send(status, body)
                return
            if path == DEMAND:
                await self._demand(request, reply)
                return
        call, counted = Call.from_request(request), False
        if self._logs_json:
            call.trace_id = read_trace_id(request.headers)
            bind_request(call.id, call.trace_id)
        if self._own_headers:
            call.forwarded_headers = [header for header in call.forwarded_headers if header[0] not in self._own_headers]
        try:
            if path in _POSTED or path in REFERENCE or path.startswith("/v1/") or (path == SCORE and self._part == "all"):
                handler.authenticate(call)
                if self._router.services is None or path not in _POSTED:
                    handler.select_class(call)
            if self._router.tracer is not None:
                self._start_span(self._router.tracer, call, request)
            batches = self._router.batches
            if batches is not None and served and batches.serves(path):
                await batches.forward(call, request, reply)
                return
            allowed = self._allowed(path) if served else ()
            if not allowed:
                hint = "" if self._part == "admin" else f" GET {OPENAPI} lists the paths."
                raise ApiError(404, f"There is no path {truncate(path)} here.{hint}", code="not_found")
            if call.method not in allowed:
                allow = ", ".join(allowed)
                message = f"{call.method} is not allowed on {truncate(path)}; use {allow}."
                raise ApiError(405, message, code="method_not_allowed", headers=[(b"allow", allow.encode())])
            if page is not None:
                call.status = 200
                page(reply)
                return
            if path in REFERENCE:
                await handler.forward_unprompted(call, reply)
                return
            if path.startswith(STORED):  # any worker reads them, for the tenant in the header
                await call.read_body(request, self._router.config.max_body_bytes)
                call.body = b""
                await handler.forward_unprompted(call, reply)
                return
            services = self._router.services
            if services is not None:  # its own service counts the quota of another service's model
                await call.read_body(request, self._router.config.max_body_bytes)
                route = services.find(request, call.body, self._router.prompts.model_names())
                if route is not None and not call.is_from_batch_server:  # another service must not get the shared secret
                    await services.forward(call, request, reply, route)
                    return
                handler.select_class(call)  # not before: another service has its own classes
            if path not in _QUERIES:
                assert call.account is not None
                handler.check_quota(call.account)
            if services is None:
                await call.read_body(request, self._router.config.max_body_bytes)
            table = self._router.table
            if path not in _QUERIES and not table.any_usable() and not table.last_runtime:  # another engine has other fields
                await self._router.prompts.validate(path, call.body, call.caller.tenant.name)
            if path in _PROMPTED:
                prompt = await self._prompt(call)
                self._router.demand.request_started(0 if call.is_best_effort else prompt.length)
                counted = True
                if self._router.redirector.is_enabled and not has_opted_out(request.headers):
                    raise await self._router.redirector.redirect(call, prompt)
                await handler.forward(call, prompt, reply)
            elif path in _QUERIES:
                await self._query(call, reply)
            else:
                assert call.account is not None
                await self._router.prompts.check_size(call.body, call.account.use)
                self._router.demand.request_started()
                counted = True
                await handler.forward_unprompted(call, reply)
        except ApiError as error:
            await self._refuse(call, error, request, reply)
        except asyncio.CancelledError:
            if request.is_disconnected:
                call.ending = "client_gone"
            else:  # the drain timeout has passed
                call.ending = "broken"
                if not reply.started or call.is_held:
                    await self._refuse(call, unavailable(SHUTTING_DOWN, retry_after=1), request, reply)
        except Exception:
            logger.exception("request %s: internal error of the router", call.id)
            call.ending = "broken"
            if not reply.started or call.is_held:  # else closing the connection tells the client that the answer is truncated
                await self._refuse(
                    call,
                    ApiError(500, f"The router failed: its log has the cause under {call.id}.", kind="server_error", code="internal"),
                    request,
                    reply,
                )
        finally:
            if counted:
                self._router.demand.request_ended(call)
            call.release_body()
            self._log(call)
            if self._router.tracer is not None:
                self._end_span(call)

    def _serves(self, path: str) -> bool:
        return self._part == "all" or path in ON_BOTH or (path in ADMIN) == (self._part == "admin")

    def _allowed(self, path: str) -> tuple[str, ...]:
        """Return the methods of a path; empty for an unknown path."""
        if path in _POSTED or path == SCORE:
            return ("POST",)
        if path in REFERENCE:
            return ("GET",)
        if stored := _STORED_PATH.fullmatch(path):
            return {None: ("GET", "DELETE"), "/input_items": ("GET",)}.get(stored[1], ("POST",))
        return ("GET", "HEAD") if path in (*self._pages, PROBE, DEMAND) or path.startswith(MODEL) else ()

    def close(self) -> None:
        """Flush the access log."""
        self._access.flush()

    async def _demand(self, request: Request, reply: Reply) -> None:
        try:
            reply.send(200, await self._router.demand.answer(request.query))
        except ApiError as error:
            reply.send(error.status, error.body, error.headers)

    async def _query(self, call: Call, reply: Reply) -> None:
        if call.path == SCORE:
            answer = await self._router.score_page.answer(call.body)
        else:
            answer = await self._router.queries.answer(call.path, call.body, call.caller.salt)
        body = msgspec.json.encode(answer)
        call.status = 200
        reply.send(200, body, [(b"x-request-id", call.id.encode())])

    async def _prompt(self, call: Call) -> Prompt:
        began = monotonic()
        with call.span.child("tokenize"):
            assert call.account is not None
            tenant, pay = call.caller.tenant.name, call.account.use
            prompt = await self._router.prompts.read(call.path, call.body, call.caller.salt, call.session, tenant, pay)
            if call.path == CHAT:
                prompt = await self._router.rendering.correct(call.body, prompt)
        self._router.metrics.overhead.observe(monotonic() - began)
        call.prompt_tokens, call.model = prompt.length, prompt.model
        return prompt

    async def _refuse(self, call: Call, error: ApiError, request: Request, reply: Reply) -> None:
        call.status = error.status
        body = error.document(call.path)
        if call.is_held and call.held_stream is not None:
            call.held_stream.fail(body)
            return
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        reply.start(error.status, [*headers, *error.headers, (b"x-request-id", call.id.encode())])
        reply.write(body)
        if (b"connection", b"close") in error.headers:
            await linger(request)
        reply.end()

    def _log(self, call: Call) -> None:
        now = monotonic()
        path = call.path if call.path in _POSTED else "other"
        status = str(call.status) if call.status else "499"
        if call.other_service:  # the errors of another service are not this one's
            self._router.metrics.forwarded.labels(call.other_service, status).inc()
        else:
            self._router.metrics.count_request(path, status)
        if call.service_class is not None and path in _PROMPTED:
            self._router.slo_report.record(call, now)
        if self._router.stack_metrics is not None and path in _PROMPTED and call.prompt_tokens is not None:
            self._router.stack_metrics.record(call)
        is_known = call.caller is not ANONYMOUS or not self._router.handler.keys.is_required
        if self._router.request_log is not None and path in _PROMPTED and is_known:  # strangers must not push out requests
            self._router.request_log.record(call, now)
        if self._access.is_enabled:
            self._access.write(
                f"{call.id} {call.method} {path} {status} caller={call.log_name} class={call.class_name}"
                f" worker={call.worker or '-'} attempts={call.attempts}"
                f" prompt_tokens={_or_dash(call.prompt_tokens)} predicted={_or_dash(call.predicted_tokens)}"
                f" cached={_or_dash(call.cached_tokens)}"
                f" ttfb_ms={'-' if call.first_byte_at is None else f'{1000 * (call.first_byte_at - call.started_at):.1f}'}"
                f" total_ms={1000 * (now - call.started_at):.1f} bytes={call.bytes_out} end={call.ending}",
                call.id,
                call.trace_id,
            )

    def _start_span(self, tracer: Tracer, call: Call, request: Request) -> None:
        """Start the request's span once its key is accepted: strangers must not fill the collector."""
        name = f"{call.method} {call.path if call.path in _POSTED else 'other'}"
        call.span = tracer.start(name, request.headers, call.started_at)
        call.trace_id = call.span.trace_id
        if self._logs_json:
            bind_request(call.id, call.trace_id)

    def _end_span(self, call: Call) -> None:
        call.span.set(
            {
                "http.request.method": call.method,
                "http.response.status_code": call.status or 499,
                "fairlead.request_id": call.id,
                "fairlead.tenant": call.caller.tenant.name or None,
                "fairlead.worker": call.worker or None,
                "fairlead.attempts": call.attempts,
                "gen_ai.usage.input_tokens": call.prompt_tokens,
                "fairlead.predicted_cached_tokens": call.predicted_tokens,
                "fairlead.cached_tokens": call.cached_tokens,
            }
        )
        if call.status >= 500 or call.ending != "ok":
            call.span.fail(call.ending if call.ending != "ok" else f"status {call.status}")
        call.span.end()

    # Pages

    def _health(self, reply: Reply) -> None:
        reply.send(200, b'{"status":"ok"}')

    def _ready(self, reply: Reply) -> None:
        reason = self._router.not_ready_reason()
        reply.send(503 if reason else 200, msgspec.json.encode({"ready": not reason, "reason": reason}))

    def _version(self, reply: Reply) -> None:
        reply.send(200, msgspec.json.encode({"version": importlib.metadata.version("fairlead")}))

    def _metrics(self, reply: Reply) -> None:
        reply.send(200, self._router.metrics.text(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    def _workers(self, reply: Reply) -> None:
        reply.send(200, msgspec.json.encode(self._router.describe_workers()))

    def _split(self, reply: Reply) -> None:
        reply.send(200, msgspec.json.encode(self._router.canary.report() if self._router.canary is not None else SplitReport()))

    def _models(self, anthropic: bool, reply: Reply) -> None:
        models = self._router.models()
        reply.send(200, msgspec.json.encode(to_anthropic_list(models) if anthropic else {"object": "list", "data": models}))

    def _model(self, name: str, anthropic: bool, reply: Reply) -> None:
        for model in self._router.models():
            if model["id"] == name:
                reply.send(200, msgspec.json.encode(to_anthropic_model(model) if anthropic else model))
                return
        error = ApiError(404, f"There is no model {quote(name)} here; GET /v1/models lists them.", param="model", code="model_not_found")
        reply.send(error.status, error.body, error.headers)


def _is_foreign(request: Request) -> bool:
    headers = dict(request.headers)
    return is_foreign_to_admin(headers.get(b"origin"), headers.get(b"host", b""))


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
