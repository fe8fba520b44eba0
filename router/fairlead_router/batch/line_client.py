"""Sends one line to the router and classifies the answer: a result, or a reason to send it again."""

import random
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from fairlead_router.batch.router_certificate import RouterCertificate
from fairlead_router.batch.validation import Line
from fairlead_router.request.client_request import OPT_OUT
from fairlead_router.tenancy.shared_secret import SharedSecret

MAX_ANSWER_BYTES: Final = 32 << 20
SECONDS: Final = 1200.0
"""Longest time for one answer. The router ends a request that has none after --request-timeout, 600 s."""
REPEATED: Final = frozenset((401, 403, 408, 409, 425, 429))
"""4xx statuses that are not the line's own fault: too much load, or credentials that the operator must repair."""
MAX_FAILURES: Final = 5
"""Statuses 500 and 502 after which a line fails: it may be what makes workers end."""
LONGEST_RETRY: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a line. `body` is JSON without line breaks."""

    status: int
    request_id: str
    body: bytes


class _Error(msgspec.Struct, frozen=True):
    code: str | int | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error = _Error()


@dataclass(frozen=True, slots=True)
class Retry:
    """The line must be sent again. `is_quota`: only its tenant must wait. `is_failure`: the service failed rather than being busy."""

    seconds: float
    reason: str
    is_quota: bool = False
    is_failure: bool = False


class LineClient:
    """HTTP client of the routers. Use it as an async context manager."""

    def __init__(self, router_url: str, secret: SharedSecret, certificate: RouterCertificate | None = None) -> None:
        """`certificate`: of routers with TLS; None: the system's authorities verify them."""
        self._url, self._secret, self._certificate = router_url, secret, certificate

    async def __aenter__(self) -> "LineClient":
        timeout = aiohttp.ClientTimeout(total=SECONDS, sock_connect=5)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def send(self, tenant: str, endpoint: str, id: str, line: Line, tries: int, failures: int) -> Answer | Retry:
        """Send a line for `tenant`. `tries`: how often it was sent before. `failures`: how often the service failed on it."""
        headers = {"content-type": "application/json", "x-request-id": id, "x-slo-class": "batch", OPT_OUT.decode(): "proxy"}
        try:
            headers |= self._secret.headers(tenant)
            trust = True if self._certificate is None else self._certificate.context()
            async with self._session.post(self._url + endpoint, data=bytes(line.body), headers=headers, ssl=trust) as response:
                body = await _read(response)
                status, retry_after = response.status, response.headers.get("retry-after", "")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # ValueError: a mounted file is incomplete
            return Retry(_backoff(tries), f"{type(error).__name__}: {error}"[:300])
        if body is None:
            return Answer(500, id, _error(f"The answer exceeds {MAX_ANSWER_BYTES} bytes."))
        if status in REPEATED or status >= 500:
            is_failure = status in (500, 502)
            if is_failure and failures + 1 >= MAX_FAILURES:
                return Answer(status, id, _compact(body) or _error("The service failed without a reason."))
            seconds = float(retry_after) if retry_after.isdigit() else _backoff(tries)
            is_quota = status in (401, 403) or (status == 429 and _code(body) == "rate_limit_exceeded")
            return Retry(min(seconds, LONGEST_RETRY), f"HTTP {status}", is_quota, is_failure)
        compact = _compact(body)
        if compact is None:  # a worker or router was killed within its answer
            return Retry(_backoff(tries), f"HTTP {status} without JSON", is_failure=True)
        return Answer(status, response.headers.get("x-request-id", id), compact)


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the body; None if it is too long."""
    body = bytearray()
    async for piece in response.content.iter_chunked(1 << 16):
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            return None
    return bytes(body)


def _compact(body: bytes) -> bytes | None:
    """Return the JSON object on one line; None if it is none."""
    try:
        msgspec.json.decode(body, type=dict)
        return msgspec.json.format(body, indent=-1)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _code(body: bytes) -> str | int | None:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "server_error", "param": None, "code": None}})


def _backoff(tries: int) -> float:
    return float(min(LONGEST_RETRY, 2.0 ** min(tries, 10) * random.uniform(0.5, 1.0)))
