"""HTTP application: paths, errors, and one access log line for each request (without prompts, tokens or keys)."""

import asyncio
import importlib.metadata
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from fairlead_common.canary_split import SplitReport
from fairlead_common.http.client_connection import Request
from fairlead_common.http.origins import FOREIGN, FOREIGN_CHANGE, is_foreign, is_foreign_to_admin, parse_origins
from fairlead_common.http.response import Reply
from fairlead_common.protocols.model_list import ANTHROPIC_VERSION, ModelList, to_anthropic_list, to_anthropic_model
from fairlead_common.protocols.paths import CHAT, COMPUTED
from fairlead_common.telemetry.logs import bind_request
from fairlead_common.telemetry.spans import read_trace_id
from fairlead_common.telemetry.tracer import Tracer
from fairlead_common.truncate import quote, truncate
from fairlead_router import access_log
from fairlead_router.access_log import AccessLog
from fairlead_router.console.console import Console
from fairlead_router.console.console import serves as is_console_path
from fairlead_router.errors import SHUTTING_DOWN, ApiError, Headers, unavailable
from fairlead_router.interop.redirect import has_opted_out, uses_stored_response
from fairlead_router.interop.score_page import PATH as SCORE
from fairlead_router.paths import (
    ADMIN,
    METHODS,
    MODEL,
    MODELS,
    ON_BOTH,
    OPENAPI,
    POSTED,
    QUERIES,
    REFERENCE,
    SAFE,
    STORED,
    methods_of,
)
from fairlead_router.request.client_request import Call, RequestHead, linger
from fairlead_router.request.price import LEFT_PRICE, REFUSED_PRICE, price_of_cpu
from fairlead_router.request.prompts import Prompt
from fairlead_router.request.validation import too_long
from fairlead_router.router import Router
from fairlead_router.serving.demand import PATH as DEMAND
from fairlead_router.serving.probe import PATH as PROBE
from fairlead_router.tenancy.tenants import ANONYMOUS, read_credential
from fairlead_router.wire.cors import Cors

if TYPE_CHECKING:
    from fairlead_router.serving.service_forwarding import ServiceForwarder

logger = logging.getLogger(__name__)

Part = Literal["all", "inference", "admin"]
Page = Callable[[Reply], Awaitable[None] | None]
"""A page that is built at once, or in parts."""


class App:
    """Callable that answers one request: `await app(request, reply)`. The connection cancels its task when the client disconnects."""

    def __init__(self, router: Router, part: Part = "all") -> None:
        """`part`: the paths that this port serves; all others are answered with 404."""
        self._router, self._part = router, part
        self._console = Console(router, shows_all_tenants=part == "admin") if router.config.console else None
        self._logs_json = router.config.log_format == "json"
        self._session_header = router.config.session_header.encode()
        self._access = AccessLog(logging.getLogger(access_log.NAME), json=self._logs_json)
        origins = parse_origins(router.config.allowed_origins) if part != "admin" else ()
        self._origins = origins
        self._cors = Cors(origins) if origins else None
        self._own_headers = (router.tracer.header_names if router.tracer else frozenset()) | ({b"origin"} if origins else frozenset())
        """Headers of the client that the worker does not get, because the router answers or replaces them."""
        self._pages: dict[str, Page] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/fairlead/workers": self._workers,
            "/fairlead/split": self._split,
            MODELS: partial(self._models, False),
            "/version": self._version,
        }

    async def __call__(self, request: Request, reply: Reply) -> None:
        if (self._cors is not None or request.path not in POSTED) and await self._answer_page(request, reply):
            return
        call = Call(RequestHead.read(request, self._session_header, self._own_headers))
        if self._logs_json:
            call.trace_id = read_trace_id(request.headers)
            bind_request(call.head.id, call.trace_id)
        try:
            await self._answer(call, request, reply)
        except ApiError as error:
            await self._refuse(call, error, request, reply)
        except asyncio.CancelledError:
            if request.is_disconnected:
                call.outcome.ending = "client_gone"
                if call.account is not None and not call.outcome.status:
                    call.account.use(LEFT_PRICE)
            else:  # the drain timeout has passed
                await self._end_broken(call, unavailable(SHUTTING_DOWN, retry_after=1), request, reply)
        except Exception:
            logger.exception("request %s: internal error of the router", call.head.id)
            message = f"The router failed: its log has the cause under {call.head.id}."
            await self._end_broken(call, ApiError(500, message, kind="server_error", code="internal"), request, reply)
        finally:
            if call.is_counted:
                self._router.demand.request_ended(call.outcome)
            call.release_body()
            self._log(call)
            if self._router.tracer is not None:
                self._end_span(call)

    async def _answer_page(self, request: Request, reply: Reply) -> bool:
        """Answer what needs neither a key nor a line in the access log. Return False for any other request."""
        path, keys = request.path, self._router.handler.keys
        if self._console is not None and is_console_path(path):  # before CORS: no other page may read it
            await self._console.answer(request, reply)
            return True
        if path in ADMIN:
            if (refusal := self._refuse_admin(request)) is not None:
                reply.send(refusal.status, refusal.body, refusal.headers)
                return True
        elif self._cors is not None and self._cors.answer(request, reply):
            return True
        if not self._serves(path):
            return False
        if request.method in ("GET", "HEAD"):
            page = self._find_page(request)
            if page is not None and not (keys.is_required and path.startswith("/v1/")):
                await _show(page, reply)
                return True
            if path == PROBE:
                reply.send(*await self._router.probe.run())
                return True
        if path == DEMAND and request.method in METHODS[DEMAND]:
            await self._demand(request, reply)
            return True
        return False

    def _find_page(self, request: Request) -> Page | None:
        path = request.path
        if not self._serves(path) or not (path == MODELS or path.startswith(MODEL)):
            return self._pages.get(path)
        anthropic = any(name == ANTHROPIC_VERSION for name, _ in request.headers)
        return partial(self._models, anthropic) if path == MODELS else partial(self._model, path.removeprefix(MODEL), anthropic)

    def _answer(self, call: Call, request: Request, reply: Reply) -> Coroutine[Any, Any, None]:
        """Authenticate a request, and return what answers it, by its path. Raises ApiError."""
        router, path = self._router, call.head.path
        self._authenticate(call, request)
        if router.tracer is not None:
            self._start_span(router.tracer, call, request)
        if router.batches is not None and self._serves(path) and router.batches.serves(path):
            self._check_origin(request)
            assert call.account is not None
            router.handler.check_debt(call.account)
            return router.batches.forward(call, request, reply)
        self._check_method(call.head)
        if call.head.method in ("GET", "HEAD") and (page := self._find_page(request)) is not None:
            call.outcome.status = 200
            return _show(page, reply)
        if path in REFERENCE or path.startswith(STORED):
            assert call.account is not None
            router.handler.check_debt(call.account)
            return self._forward_bodiless(call, request, reply)
        if router.services is None:
            return (self._query if path in QUERIES else self._infer)(call, request, reply)
        return self._find_service(router.services, call, request, reply)

    async def _forward_bodiless(self, call: Call, request: Request, reply: Reply) -> None:
        """Forward a request for a stored response, which any worker reads for the tenant in the header, or for the reference.

        It needs no body. One that comes is received, charged and dropped.
        """
        await call.read_body(request, self._router.config.max_body_bytes)
        assert call.account is not None
        call.account.use(price_of_cpu(len(call.body), 0.0))
        call.body = b""
        await self._router.handler.forward_unprompted(call, reply)

    async def _find_service(self, services: "ServiceForwarder", call: Call, request: Request, reply: Reply) -> None:
        """Answer a request for this service, or forward it to the one that has its model, which counts the quota."""
        router = self._router
        await call.read_body(request, router.config.max_body_bytes)
        route = services.find(request, call.body, router.prompts.model_names())
        if route is not None and not call.is_from_batch_server:  # another service must not get the shared secret
            await services.forward(call, request, reply, route)
            return
        router.handler.select_class(call)  # not before: another service has its own classes
        await (self._query if call.head.path in QUERIES else self._infer)(call, request, reply)

    def _authenticate(self, call: Call, request: Request) -> None:
        handler, path = self._router.handler, call.head.path
        credential = read_credential(request.headers)
        is_score = path == SCORE and self._part == "all" and not handler.is_own(credential)  # the service itself has no tenant
        if path in POSTED or path in REFERENCE or path.startswith("/v1/") or is_score:
            handler.authenticate(call, credential)
            if self._router.services is None or path not in POSTED:
                handler.select_class(call)

    def _check_method(self, head: RequestHead) -> None:
        """Raise ApiError: 404 for a path that this port does not serve, 405 for a method that the path does not have."""
        allowed = methods_of(head.path) if self._serves(head.path) else ()
        if not allowed:
            hint = "" if self._part == "admin" else f" GET {OPENAPI} lists the paths."
            raise ApiError(404, f"There is no path {truncate(head.path)} here.{hint}", code="not_found")
        if head.method not in allowed:
            allow = ", ".join(allowed)
            message = f"{head.method} is not allowed on {truncate(head.path)}; use {allow}."
            raise ApiError(405, message, code="method_not_allowed", headers=[(b"allow", allow.encode())])

    async def _infer(self, call: Call, request: Request, reply: Reply) -> None:
        """Answer a request for the engine. With routes to other services, its body is read already."""
        router, path = self._router, call.head.path
        assert call.account is not None
        router.handler.check_quota(call.account)
        if router.services is None:
            await call.read_body(request, router.config.max_body_bytes)
        if not router.table.any_usable() and not router.table.last_runtime:  # another engine has other fields
            await router.prompts.validate(path, call.body, call.caller.tenant.name, call.account.use)
        if path not in COMPUTED:
            await router.prompts.check_size(call.body, call.account.use)
            router.demand.request_started()
            call.is_counted = True
            await router.handler.forward_unprompted(call, reply)
            return
        prompt = await self._prompt(call)
        router.demand.request_started(0 if call.is_best_effort else prompt.prompt_tokens)
        call.is_counted = True
        if router.redirector.is_enabled and not has_opted_out(request.headers) and not uses_stored_response(path, call.body):
            raise await router.redirector.redirect(call, prompt)
        await router.handler.forward(call, prompt, reply)

    async def _end_broken(self, call: Call, error: ApiError, request: Request, reply: Reply) -> None:
        """End a request that failed here. Once its answer has begun, closing the connection tells the client that it is truncated."""
        call.outcome.ending = "broken"
        if not reply.started or call.is_held:
            await self._refuse(call, error, request, reply)

    def _serves(self, path: str) -> bool:
        return self._part == "all" or path in ON_BOTH or (path in ADMIN) == (self._part == "admin")

    def _refuse_admin(self, request: Request) -> ApiError | None:
        """Return why a request for an admin path is refused: a foreign web page sent it, or the clients' port needs a credential."""
        headers = dict(request.headers)
        if is_foreign_to_admin(headers.get(b"origin"), headers.get(b"host", b"")):
            return ApiError(403, FOREIGN, kind="permission_error", code="forbidden_origin")
        try:
            if self._part == "all":
                changes_state = request.path == DEMAND and request.method not in SAFE
                self._router.handler.check_admin(read_credential(request.headers), changes_state=changes_state)
        except ApiError as error:
            return error
        return None

    def _check_origin(self, request: Request) -> None:
        """Raise ApiError 403 for a change by a web page that `--allowed-origins` does not list. A form needs no permission to send it."""
        headers = dict(request.headers)
        origin = headers.get(b"origin")
        if request.method in SAFE or not is_foreign(origin, headers.get(b"host", b"")):
            return
        if not {"*", (origin or b"").decode("latin-1")} & set(self._origins):
            raise ApiError(403, FOREIGN_CHANGE, kind="permission_error", code="forbidden_origin")

    def close(self) -> None:
        """Flush the access log."""
        self._access.flush()

    async def _demand(self, request: Request, reply: Reply) -> None:
        try:
            reply.send(200, await self._router.demand.answer(request.query, takes_report=request.method not in SAFE))
        except ApiError as error:
            reply.send(error.status, error.body, error.headers)

    async def _query(self, call: Call, request: Request, reply: Reply) -> None:
        router, tenant = self._router, call.caller.tenant.name
        limit, reason = router.config.max_body_bytes, "--max-body-bytes"
        if call.head.path != SCORE and (most := router.queries.body_limit(call.head.path)) < limit:
            limit, reason = most, "queries: the model's context"
        if call.account is not None:  # None on the admin port, which has no tenants
            router.handler.check_quota(call.account)
        try:
            if not call.body:  # with routes to other services it is there
                await call.read_body(request, limit, reason)
            elif len(call.body) > limit:
                raise call.too_large(limit, reason)
        finally:
            if call.account is not None:
                router.handler.charge_query(call.account, min(request.received, limit), len(router.table))
        if call.head.path == SCORE:
            body = await router.score_page.answer(call.body, call.caller)
        else:
            body = await router.queries.answer(call.head.path, call.body, tenant, call.caller.salt)
        call.outcome.status = 200
        reply.send(200, body, [(b"x-request-id", call.head.id.encode())])

    async def _prompt(self, call: Call) -> Prompt:
        began = monotonic()
        with call.span.child("tokenize"):
            assert call.account is not None
            prompt = await self._router.prompts.read(call.head.path, call.body, call.caller, call.head.session, call.account.use)
            if prompt.min_tokens and not self._router.table.last_runtime:  # another engine may cut it
                raise too_long(call.head.path, prompt.min_tokens, prompt.longest)
            if call.head.path == CHAT:
                prompt = await self._router.rendering.correct(call.body, prompt)
        self._router.metrics.overhead.observe(monotonic() - began)
        call.outcome.prompt_tokens, call.outcome.model = prompt.prompt_tokens, prompt.model
        return prompt

    async def _refuse(self, call: Call, error: ApiError, request: Request, reply: Reply) -> None:
        call.outcome.status = error.status
        # A query has paid, and a client that must wait pays when its request runs.
        if call.account is not None and call.head.path not in QUERIES and 400 <= error.status < 500 and error.status != 429:
            call.account.use(REFUSED_PRICE)
        body = error.document(call.head.path)
        if call.is_held and call.held_stream is not None:
            call.held_stream.fail(body)
            return
        headers: Headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        reply.start(error.status, [*headers, *error.headers, (b"x-request-id", call.head.id.encode())])
        reply.write(body)
        if (b"connection", b"close") in error.headers:
            await linger(request)
        reply.end()

    def _log(self, call: Call) -> None:
        now, outcome = monotonic(), call.outcome
        path = call.head.path if call.head.path in POSTED else "other"
        status = str(outcome.status) if outcome.status else "499"
        if outcome.other_service:  # the errors of another service are not this one's
            self._router.metrics.forwarded.labels(outcome.other_service, status).inc()
        else:
            self._router.metrics.count_request(path, status)
        if call.service_class is not None and path in COMPUTED:
            self._router.slo_report.record(call, now)
        if self._router.stack_metrics is not None and path in COMPUTED and outcome.prompt_tokens is not None:
            self._router.stack_metrics.record(call)
        is_known = call.caller is not ANONYMOUS or not self._router.handler.keys.is_required
        if self._router.request_log is not None and path in COMPUTED and is_known:  # strangers must not push out requests
            self._router.request_log.record(call, now)
        if self._access.is_enabled:
            first = "-" if outcome.first_byte_at is None else f"{1000 * (outcome.first_byte_at - call.head.started_at):.1f}"
            self._access.write(
                f"{call.head.id} {call.head.method} {path} {status} caller={call.log_name} class={call.class_name}"
                f" worker={outcome.worker or '-'} attempts={outcome.attempts}"
                f" prompt_tokens={_or_dash(outcome.prompt_tokens)} predicted={_or_dash(outcome.predicted_tokens)}"
                f" cached={_or_dash(outcome.cached_tokens)} ttfb_ms={first}"
                f" total_ms={1000 * (now - call.head.started_at):.1f} bytes={outcome.bytes_out} end={outcome.ending}",
                call.head.id,
                call.trace_id,
            )

    def _start_span(self, tracer: Tracer, call: Call, request: Request) -> None:
        """Start the request's span once its key is accepted: strangers must not fill the collector."""
        name = f"{call.head.method} {call.head.path if call.head.path in POSTED else 'other'}"
        call.span = tracer.start(name, request.headers, call.head.started_at)
        call.trace_id = call.span.trace_id
        if self._logs_json:
            bind_request(call.head.id, call.trace_id)

    def _end_span(self, call: Call) -> None:
        call.span.set(
            {
                "http.request.method": call.head.method,
                "http.response.status_code": call.outcome.status or 499,
                "fairlead.request_id": call.head.id,
                "fairlead.tenant": call.caller.tenant.name or None,
                "fairlead.worker": call.outcome.worker or None,
                "fairlead.attempts": call.outcome.attempts,
                "gen_ai.usage.input_tokens": call.outcome.prompt_tokens,
                "fairlead.predicted_cached_tokens": call.outcome.predicted_tokens,
                "fairlead.cached_tokens": call.outcome.cached_tokens,
            }
        )
        if call.outcome.status >= 500 or call.outcome.ending != "ok":
            call.span.fail(call.outcome.ending if call.outcome.ending != "ok" else f"status {call.outcome.status}")
        call.span.end()

    # Pages

    def _health(self, reply: Reply) -> None:
        reply.send(200, b'{"status":"ok"}')

    def _ready(self, reply: Reply) -> None:
        reason = self._router.not_ready_reason()
        reply.send(503 if reason else 200, msgspec.json.encode({"ready": not reason, "reason": reason}))

    def _version(self, reply: Reply) -> None:
        reply.send(200, msgspec.json.encode({"version": importlib.metadata.version("fairlead")}))

    async def _metrics(self, reply: Reply) -> None:
        reply.send(200, await self._router.metrics.render(), content_type=b"text/plain; version=0.0.4; charset=utf-8")

    async def _workers(self, reply: Reply) -> None:
        reply.send(200, await self._router.describe_workers())

    def _split(self, reply: Reply) -> None:
        reply.send(200, msgspec.json.encode(self._router.canary.report() if self._router.canary is not None else SplitReport()))

    def _models(self, anthropic: bool, reply: Reply) -> None:
        models = self._router.models()
        reply.send(200, msgspec.json.encode(to_anthropic_list(models) if anthropic else ModelList(models)))

    def _model(self, name: str, anthropic: bool, reply: Reply) -> None:
        for model in self._router.models():
            if model.id == name:
                reply.send(200, msgspec.json.encode(to_anthropic_model(model) if anthropic else model))
                return
        error = ApiError(404, f"There is no model {quote(name)} here; GET /v1/models lists them.", param="model", code="model_not_found")
        reply.send(error.status, error.body, error.headers)


async def _show(page: Page, reply: Reply) -> None:
    if (building := page(reply)) is not None:
        await building


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
