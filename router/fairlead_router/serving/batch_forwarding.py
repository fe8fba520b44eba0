"""Forwarding of `/v1/files` and `/v1/batches` to the batch server. Bodies stream in both directions, so an upload takes no memory here."""

import re
from collections.abc import AsyncIterator
from typing import Final

import aiohttp
from yarl import URL

from fairlead_common.http.client_connection import STREAMED_BYTES, Request
from fairlead_common.http.response import Reply
from fairlead_router.errors import ApiError, Headers, unavailable
from fairlead_router.request.client_request import Call, linger
from fairlead_router.request.price import price_of_batch_request, price_of_report
from fairlead_router.serving.relay import relay_body
from fairlead_router.tenancy.shared_secret import SharedSecret

ROOTS: Final = ("/v1/files", "/v1/batches")
LONGEST_SECONDS: Final = 3600.0
"""Longest time of one upload or download."""
_PATH = re.compile(r"/v1/(?:files|batches)(?:/[A-Za-z0-9_-]{1,64}){0,2}")
_FORWARDED = (b"content-type", b"accept")
_RETURNED = ("content-type", "content-length", "retry-after")


class BatchForwarder:
    """Client of the batch server. It authenticates with the shared secret and names the caller's tenant."""

    def __init__(self, url: str, secret: SharedSecret) -> None:
        self._url, self._secret = URL(url), secret
        self._session: aiohttp.ClientSession | None = None

    @staticmethod
    def serves(path: str) -> bool:
        return path in ROOTS or path.startswith(tuple(f"{root}/" for root in ROOTS))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def forward(self, call: Call, request: Request, reply: Reply) -> None:
        """Answer a request. Raises ApiError if the batch server does not answer."""
        if not _PATH.fullmatch(call.head.path):
            raise ApiError(404, "There is no such path here: files and batches have ids of letters, digits, - and _.", code="not_found")
        if self._session is None:  # created here: it needs the running loop
            timeout = aiohttp.ClientTimeout(total=LONGEST_SECONDS, sock_connect=5)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        headers = {name.decode(): value.decode("latin-1") for name, value in call.head.forwarded_headers if name in _FORWARDED}
        try:
            headers |= self._secret.headers(call.caller.tenant.name)
        except (OSError, ValueError):
            raise unavailable("The router's secret for the batch server cannot be read. Try again in 5 s.", retry_after=5) from None
        body = None
        if request.method not in ("GET", "HEAD") and (call.head.length != 0) and not (request.is_complete and not request.received):
            call.reserve_body(min(STREAMED_BYTES, STREAMED_BYTES if call.head.length is None else call.head.length))
            body = _body(request)
            if call.head.length is not None:
                headers["content-length"] = str(call.head.length)
        try:
            await self._exchange(call, request, reply, headers, body)
        finally:
            call.pay_for_pieces(request)
            if call.account is not None:
                is_change = request.method not in ("GET", "HEAD")
                call.account.use(price_of_batch_request(is_change, request.received, call.outcome.bytes_out))

    async def _exchange(
        self, call: Call, request: Request, reply: Reply, headers: dict[str, str], body: AsyncIterator[bytes] | None
    ) -> None:
        assert self._session is not None
        url = self._url.with_path(call.head.path, encoded=True).with_query(request.query.decode("latin-1"))
        try:
            async with self._session.request(request.method, url, data=body, headers=headers, allow_redirects=False) as response:
                await self._answer(call, request, reply, response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if reply.started:  # the truncated answer ends with its connection
                call.outcome.ending = "broken"
                return
            message = f"The batch server does not answer ({type(error).__name__}). Try again in 2 s."
            refusal = unavailable(message, retry_after=2)
            if body is not None and not request.is_complete:
                refusal.headers.append((b"connection", b"close"))
            raise refusal from None

    async def _answer(self, call: Call, request: Request, reply: Reply, response: aiohttp.ClientResponse) -> None:
        call.outcome.status = response.status
        if call.account is not None and (cpu := response.headers.get("x-fairlead-cpu-ms")) is not None:
            call.account.use(price_of_report(cpu.encode()))
        headers: Headers = [(name.encode(), response.headers[name].encode()) for name in _RETURNED if name in response.headers]
        headers.append((b"x-request-id", call.head.id.encode()))
        is_early = not request.is_complete and request.method not in ("GET", "HEAD")
        if is_early:
            headers.append((b"connection", b"close"))
        reply.start(response.status, headers)
        await relay_body(call, reply, response)
        if is_early:
            await linger(request)
        reply.end()


async def _body(request: Request) -> AsyncIterator[bytes]:
    """Yield the client's body as it arrives. Reading from the client pauses while the batch server does not read."""
    request.is_streamed = request.extends_timeout = True
    while True:
        if piece := request.take():
            yield piece
        if request.is_complete and not request.body:
            return
        if not request.body:
            await request.wait_for_body()
