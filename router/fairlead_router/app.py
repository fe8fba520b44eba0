"""The router as an ASGI application: paths, errors, and one line of access log for each request (no prompts, tokens or keys in it)."""

import asyncio
import logging
from collections.abc import MutableMapping
from time import monotonic
from typing import Any

import msgspec

from fairlead_router import queries
from fairlead_router.errors import ApiError, Headers, Receive, Send, answer
from fairlead_router.inbound import Call, ClientGone, linger
from fairlead_router.prompts import Prompt
from fairlead_router.redirect import opted_out
from fairlead_router.router import Router

access = logging.getLogger("fairlead_router.access")
logger = logging.getLogger(__name__)

PROMPTED = ("/v1/completions", "/v1/chat/completions")
PASSED = ("/tokenize", "/detokenize")
MODEL = "/v1/models/"


class App:
    """`await app(scope, receive, send)`, as a server calls it."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._pages = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
            "/fairlead/workers": self._workers,
            "/v1/models": self._models,
        }

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._router.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._router.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _http(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["path"]
        page = self._pages.get(path)
        if path.startswith(MODEL) and scope["method"] in ("GET", "HEAD"):
            await self._model(path.removeprefix(MODEL), send)
            return
        if page is not None and scope["method"] in ("GET", "HEAD"):
            await page(send)
            return
        call = Call.of(scope)
        try:
            if path not in PROMPTED and path not in PASSED and path not in queries.PATHS and page is None:
                raise ApiError(404, f"There is no {path[:200]} here.", code="not_found")
            if call.method != ("GET" if page is not None else "POST"):
                raise ApiError(405, f"{call.method} is not allowed on {path}.", code="method_not_allowed")
            await call.read_body(receive, self._router.config.max_body_bytes)
            if path in queries.PATHS:
                await self._query(call, send)
                return
            redirected = path in PROMPTED and self._router.redirector.on and not opted_out(scope["headers"])
            await self._proxied(call, receive, send, redirected)
        except ApiError as error:
            call.status = error.status
            await self._refuse(call, error, receive, send)
        except ClientGone:
            call.ending = "client_gone"
        except Exception:
            logger.exception("request %s: a fault of the router", call.id)
            call.ending = "broken"
            if not call.status:  # else the answer has begun, and the server closes the connection
                call.status = 500
                await self._refuse(call, ApiError(500, "The router failed.", kind="server_error", code="internal"), receive, send)
        finally:
            self._log(call)

    async def _proxied(self, call: Call, receive: Receive, send: Send, redirected: bool) -> None:
        """Prepare and forward, for as long as the client is there. Raises ClientGone as soon as it is not, Redirect to send it on."""
        task = asyncio.current_task()
        assert task is not None
        gone = False

        def client_gone(_: object) -> None:
            nonlocal gone
            gone = True
            task.cancel()

        watch = asyncio.ensure_future(receive())  # after the body, the only message left is that the client has gone
        watch.add_done_callback(client_gone)
        try:
            prompt = await self._prompt(call)
            if redirected:
                raise await self._router.redirector.redirect(call, prompt)
            await self._router.proxy.forward(call, prompt, send)
        except asyncio.CancelledError:
            if not gone:
                raise
            task.uncancel()
            raise ClientGone from None
        finally:
            watch.remove_done_callback(client_gone)
            watch.cancel()

    async def _query(self, call: Call, send: Send) -> None:
        body = msgspec.json.encode(await self._router.queries.answer(call.path, call.body))
        call.status = 200
        await answer(send, 200, body, [(b"x-request-id", call.id.encode())])

    async def _prompt(self, call: Call) -> Prompt:
        began = monotonic()
        prompt = await self._router.prompts.read(call.path, call.body) if call.path in PROMPTED else Prompt()
        self._router.metrics.overhead.observe(monotonic() - began)
        call.prompt_tokens = prompt.length
        return prompt

    async def _refuse(self, call: Call, error: ApiError, receive: Receive, send: Send) -> None:
        headers: Headers = [*error.headers, (b"x-request-id", call.id.encode())]
        if error.status != 413:
            await answer(send, error.status, error.body, headers)
            return
        fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(error.body))]
        await send({"type": "http.response.start", "status": 413, "headers": fixed + headers})
        await send({"type": "http.response.body", "body": error.body, "more_body": True})
        await linger(receive)
        await send({"type": "http.response.body", "body": b""})

    def _log(self, call: Call) -> None:
        now = monotonic()
        path = call.path if call.path in (*PROMPTED, *PASSED, *queries.PATHS) else "other"
        status = str(call.status) if call.status else "499"
        self._router.metrics.finished(call, path, status)
        if access.isEnabledFor(logging.INFO):
            access.info(
                "%s %s %s %s worker=%s attempts=%d prompt_tokens=%s predicted=%s cached=%s ttfb_ms=%s total_ms=%.1f bytes=%d end=%s",
                call.id,
                call.method,
                path,
                status,
                call.worker or "-",
                call.attempts,
                _or_dash(call.prompt_tokens),
                _or_dash(call.predicted),
                _or_dash(call.cached),
                "-" if call.first_byte is None else f"{1000 * (call.first_byte - call.began):.1f}",
                1000 * (now - call.began),
                call.bytes_out,
                call.ending,
            )

    # Pages

    async def _health(self, send: Send) -> None:
        await answer(send, 200, b'{"status":"ok"}', [])

    async def _ready(self, send: Send) -> None:
        reason = self._router.not_ready_reason()
        body = msgspec.json.encode({"ready": not reason, "reason": reason})
        await answer(send, 503 if reason else 200, body, [])

    async def _metrics(self, send: Send) -> None:
        await answer(send, 200, self._router.metrics.text(), [], b"text/plain; version=0.0.4; charset=utf-8")

    async def _workers(self, send: Send) -> None:
        await answer(send, 200, msgspec.json.encode(self._router.picture()), [])

    async def _models(self, send: Send) -> None:
        await answer(send, 200, msgspec.json.encode({"object": "list", "data": self._router.models()}), [])

    async def _model(self, name: str, send: Send) -> None:
        for model in self._router.models():
            if model["id"] == name:
                await answer(send, 200, msgspec.json.encode(model), [])
                return
        error = ApiError(404, f"There is no model {name[:200]!r} here; GET /v1/models lists them.", param="model", code="model_not_found")
        await answer(send, error.status, error.body, error.headers)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
