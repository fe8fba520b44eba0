"""Forwarding of requests for another service's model to that service's routers, which authenticate, queue and choose the worker."""

from typing import Final

import aiohttp
import msgspec

from fairlead_common.http.client_connection import Request
from fairlead_common.http.response import Reply
from fairlead_common.telemetry.spans import Span
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.request.client_request import OPT_OUT, Call
from fairlead_router.serving.model_routes import ModelRoutes, Route
from fairlead_router.serving.relay import relay_body

MARK: Final = b"x-fairlead-forwarded"
"""Header of a forwarded request. It is not forwarded again, so that outdated files of two services make no loop."""
TRIES: Final = 3
"""A router that leaves closes idle connections, and the next try gets another router. As with workers, an answer must not have begun."""
CONNECT_SECONDS: Final = 5.0
SILENCE_SECONDS: Final = 1200.0
"""Longest silence: the other router holds a request while its workers start, and ends it itself (--hold-timeout, --request-timeout)."""
MAX_HEADER: Final = 64 << 10
_FOR_ROUTERS = frozenset((b"authorization", b"x-api-key", b"x-slo-class", b"accept-encoding"))
"""Headers of the client that a router reads, and that no worker gets."""
_HOP_BY_HOP = frozenset(b"connection keep-alive proxy-authenticate proxy-connection te trailer transfer-encoding upgrade".split())
"""Headers of an answer that hold for one connection."""
_LOST = (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)


class _Body(msgspec.Struct):
    model: str = ""


class ServiceForwarder:
    """Client of the other services' routers."""

    def __init__(self, routes: ModelRoutes) -> None:
        self.routes = routes
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def find(self, request: Request, body: bytes, own: list[str]) -> Route | None:
        """Return the service of the model that `body` names; None for one of our `own` models, and for an unknown one."""
        if any(name == MARK for name, _ in request.headers):
            return None
        try:
            model = msgspec.json.decode(body, type=_Body).model
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None  # its own service refuses it
        return None if model in own else self.routes.find(model)

    async def forward(self, call: Call, request: Request, reply: Reply, route: Route) -> None:
        """Send a request with its client's credentials, and relay the answer. Raises ApiError if no router of the service answers."""
        call.outcome.worker = call.outcome.other_service = route.name
        if self._session is None:  # created here: it needs the running loop
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=SILENCE_SECONDS)
            self._session = aiohttp.ClientSession(
                timeout=timeout,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                auto_decompress=False,
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
                cookie_jar=aiohttp.DummyCookieJar(),
                max_line_size=MAX_HEADER,
                max_field_size=MAX_HEADER,
            )
        for left in reversed(range(TRIES)):
            call.outcome.attempts += 1
            with call.span.child("attempt", "client") as span:
                span.set({"fairlead.service": route.name, "fairlead.attempt": call.outcome.attempts})
                headers, url = _forwarded_headers(call, request, span), route.url + call.head.path
                try:
                    async with self._session.post(url, data=call.body, headers=headers, allow_redirects=False) as response:
                        span.set({"http.response.status_code": response.status})
                        await _answer(call, reply, response)
                    return
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    span.fail(type(error).__name__)
                    if reply.started:  # the truncated answer ends with its connection
                        call.outcome.ending = "broken"
                        return
                    if not (left and isinstance(error, _LOST)):
                        raise _refusal(route, error) from None


def _refusal(route: Route, error: BaseException) -> ApiError:
    return unavailable(f"Service {route.name}, which serves this model, does not answer ({type(error).__name__}). Try again in 2 s.", 2)


def _forwarded_headers(call: Call, request: Request, span: Span) -> list[tuple[str, str]]:
    """Return the client's headers with its credentials, without those that hold for one connection, or that only routers may set."""
    headers = [
        *(header for header in call.head.forwarded_headers if header[0] != b"origin"),  # the router that a web page calls answers CORS
        *(header for header in request.headers if header[0] in _FOR_ROUTERS),
        *span.propagate(),
        (b"x-request-id", call.head.id.encode()),
        (MARK, b"1"),
        (OPT_OUT, b"proxy"),  # clients cannot connect to the other service's workers
    ]
    return [(name.decode(), value.decode("latin-1")) for name, value in headers]


async def _answer(call: Call, reply: Reply, response: aiohttp.ClientResponse) -> None:
    call.outcome.status = response.status
    headers: Headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _HOP_BY_HOP]
    reply.start(response.status, headers)
    await relay_body(call, reply, response)
    reply.end()
