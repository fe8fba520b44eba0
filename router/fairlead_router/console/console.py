"""The paths below `/ui`. Pages are read-only; a form takes the API key and sets a session cookie."""

import asyncio
import hashlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec
from jinja2 import Environment, FileSystemLoader

from fairlead_common.http.client_connection import Request
from fairlead_common.http.origins import is_foreign
from fairlead_common.http.response import Reply
from fairlead_index.reader import IndexUnavailable
from fairlead_router.console.fleet import COLUMNS, MAX_PODS, describe_fleet, name_of
from fairlead_router.console.prefixes import describe_prefixes
from fairlead_router.console.schedule import draw_schedule, find_pod
from fairlead_router.console.session import SESSION_SECONDS, create_token, is_valid, read_digest
from fairlead_router.errors import ApiError, Headers
from fairlead_router.interop.index_lookups import IndexLookups
from fairlead_router.request.client_request import Call, RequestHead
from fairlead_router.router import Router
from fairlead_router.tenancy.tenants import ANONYMOUS, Caller, digest, read_credential

logger = logging.getLogger(__name__)

PATH: Final = "/ui"
MAX_FORM_BYTES: Final = 4096
REQUESTS_ON_PAGE: Final = 50
PREFIXES_SECONDS: Final = 5.0
"""A page of prefixes serves all loads of so many seconds: it asks the index for many of them."""
FLEET_SECONDS: Final = 1.0
FOLDER: Final = Path(__file__).parent
_HTML: Final = b"text/html; charset=utf-8"
_STATIC: Final = {
    "/ui/console.css": b"text/css; charset=utf-8",
    "/ui/console.js": b"text/javascript; charset=utf-8",
    "/ui/icon.svg": b"image/svg+xml",
}
_NAVIGATION: Final = (
    (PATH, "fleet.html", "Fleet"),
    ("/ui/requests", "requests.html", "Requests"),
    ("/ui/prefixes", "prefixes.html", "Prefixes"),
)
_HEADERS: Final[Headers] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
        b"base-uri 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


def serves(path: str) -> bool:
    """Return whether a path is of the console."""
    return path == PATH or path.startswith("/ui/")


class Console:
    """Answers the console's paths on one port."""

    def __init__(self, router: Router, shows_all_tenants: bool) -> None:
        """`shows_all_tenants`: on the admin port. Elsewhere a key sees the requests of its own tenant."""
        self._router, self._shows_all_tenants = router, shows_all_tenants
        self._keys = router.handler.keys
        self._replica = socket.gethostname()
        # Browsers ignore the port of a cookie: the consoles of two services on 127.0.0.1 need different names.
        self._cookie = f"fairlead_console_{hashlib.sha256(router.config.namespace.encode()).hexdigest()[:12]}"
        self._rendering, self._prefixes_lock = asyncio.Lock(), asyncio.Lock()
        self._built_fleet: tuple[float, dict[str, Any]] = (float("-inf"), {})  # when it was built, and the figures
        self._prefix_pages: dict[str | None, tuple[float, bytes]] = {}  # tenant → time of the page, and the page
        self._static = {path: (FOLDER / "static" / path.rpartition("/")[2]).read_bytes() for path in _STATIC}
        self._templates = Environment(loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
        self._templates.filters |= {"number": _number, "share": _share, "milliseconds": _milliseconds, "text": str, "time": _time}
        self._pages: dict[str, Callable[[Request, Reply, Caller], Awaitable[None]]] = {
            PATH: self._fleet,
            "/ui/state.json": self._state,
            "/ui/requests": self._requests,
            "/ui/prefixes": self._prefixes,
        }

    async def answer(self, request: Request, reply: Reply) -> None:
        """Answer one request. Keys are never logged and never in a URL."""
        path = request.path.rstrip("/")
        if request.method == "POST" and path in ("/ui/login", "/ui/logout"):
            await self._post(path, request, reply)
        elif request.method not in ("GET", "HEAD"):
            self._send(reply, 405, "message.html", [(b"allow", b"GET, HEAD")], message="Only GET is allowed here.")
        elif path in ("/ui/login", "/ui/logout"):  # the address after a wrong key, opened again
            reply.send(303, b"", [(b"location", PATH.encode()), *_HEADERS], _HTML)
        elif path in _STATIC:
            reply.send(200, self._static[path], _HEADERS, _STATIC[path])
        elif (page := self._pages.get(path)) is None and not path.startswith("/ui/pods/"):
            self._send(reply, 404, "message.html", message="The console has no such page.")
        elif (caller := self._caller(request)) is None:
            self._send(reply, 401, "login.html", [(b"www-authenticate", b"Bearer")], message="")
        else:
            try:
                if not self._shows_all_tenants and path != "/ui/state.json":  # an open page asks for the figures all the time
                    self._router.handler.charge_page(caller)
            except ApiError as error:
                self._send(reply, error.status, "message.html", error.headers, message=str(error))
                return
            await (self._schedule(path, reply) if page is None else page(request, reply, caller))

    def _caller(self, request: Request) -> Caller | None:
        """Return the caller by its cookie or its key; None if there is no valid one."""
        if not self._keys.is_required:
            return ANONYMOUS
        token = _find_cookie(request, self._cookie)
        if token and (caller := self._keys.find(read_digest(token))) is not None and is_valid(token, caller.secret, time.time()):
            return caller
        credential = read_credential(request.headers)
        return self._keys.find(digest(credential)) if credential else None

    async def _post(self, path: str, request: Request, reply: Reply) -> None:
        fetched = dict(request.headers)
        # Browsers send Sec-Fetch-Site only over HTTPS and to localhost, and Origin with every form.
        foreign = is_foreign(fetched.get(b"origin"), fetched.get(b"host", b""))
        if foreign or fetched.get(b"sec-fetch-site", b"none") not in (b"same-origin", b"none"):
            self._send(reply, 403, "message.html", message="Another site sent this form.")
            return
        call = Call(RequestHead.read(request))
        try:
            await call.read_body(request, MAX_FORM_BYTES)
            if path == "/ui/logout" or not self._keys.is_required:
                self._redirect(reply, request, "", 0)
                return
            key = parse_qs(call.body.decode("latin-1")).get("key", [""])[0].strip().encode()
            caller = self._keys.authenticate(key)
        except ApiError as error:
            logger.warning("console login refused with status %d: %s", error.status, error)
            self._send(reply, error.status, "login.html", error.headers, message=str(error))
            return
        self._redirect(reply, request, create_token(digest(key), caller.secret, time.time()), SESSION_SECONDS)

    def _redirect(self, reply: Reply, request: Request, token: str, seconds: int) -> None:
        is_secure = request.is_encrypted or (b"x-forwarded-proto", b"https") in request.headers
        cookie = f"{self._cookie}={token}; Path={PATH}; Max-Age={seconds}; HttpOnly; SameSite=Strict{'; Secure' if is_secure else ''}"
        reply.send(303, b"", [(b"location", PATH.encode()), (b"set-cookie", cookie.encode()), *_HEADERS], _HTML)

    async def _fleet(self, request: Request, reply: Reply, caller: Caller) -> None:
        await self._send_page(reply, "fleet.html", columns=COLUMNS, **self._describe_fleet())

    async def _state(self, request: Request, reply: Reply, caller: Caller) -> None:
        reply.send(200, msgspec.json.encode({"replica": self._replica, **self._describe_fleet()}), _HEADERS)

    def _describe_fleet(self) -> dict[str, Any]:
        """Return the figures of the fleet: of a large one at most once a second, however many pages are open."""
        table, (built_at, built) = self._router.table, self._built_fleet
        if len(table) < MAX_PODS or time.monotonic() - built_at > FLEET_SECONDS:
            built = describe_fleet(table)
            self._built_fleet = time.monotonic(), built
        return built

    async def _requests(self, request: Request, reply: Reply, caller: Caller) -> None:
        assert self._router.request_log is not None
        number = _page_number(request.query)
        first = REQUESTS_ON_PAGE * (number - 1)
        found = self._router.request_log.newest(self._tenant(caller))
        records = found[first : first + REQUESTS_ON_PAGE]
        model = next(iter(self._router.prompts.model_names()), "")
        has_more = len(found) > first + REQUESTS_ON_PAGE
        values: dict[str, Any] = {"records": records, "first": first, "total": len(found), "number": number, "has_more": has_more}
        await self._send_page(reply, "requests.html", names=self._names(), model=model, **values)

    async def _prefixes(self, request: Request, reply: Reply, caller: Caller) -> None:
        assert self._router.request_log is not None
        tenant, now = self._tenant(caller), time.monotonic()
        async with self._prefixes_lock:  # one at a time, however many ask
            self._prefix_pages = {name: page for name, page in self._prefix_pages.items() if now - page[0] < PREFIXES_SECONDS}
            if tenant not in self._prefix_pages:
                lookups, current = self._router.lookups, self._router.formats.current
                look_up = None if lookups is None else partial(self._look_up, lookups, caller.tenant.name)
                block_tokens = current.format.block_tokens if current is not None else 0
                chains = self._router.request_log.chains(tenant)
                found = await describe_prefixes(chains, look_up, block_tokens, self._names())
                page = await asyncio.to_thread(self._render, "prefixes.html", {"block_tokens": block_tokens, **found})
                if found["rows"] and not found["reason"]:
                    self._prefix_pages[tenant] = time.monotonic(), page
            else:
                page = self._prefix_pages[tenant][1]
        reply.send(200, page, _HEADERS, _HTML)

    async def _look_up(self, lookups: IndexLookups, tenant: str, hashes: Sequence[int]) -> Mapping[str, int]:
        try:
            async with lookups.turn(tenant):
                return await lookups.holders(hashes)
        except ApiError as error:
            raise IndexUnavailable(str(error)) from error

    def _tenant(self, caller: Caller) -> str | None:
        """Return the tenant whose requests the caller may see; None: all."""
        return None if self._shows_all_tenants else caller.tenant.name

    def _names(self) -> dict[str, str]:
        return {worker.address: name_of(worker) for worker in self._router.table}

    async def _schedule(self, path: str, reply: Reply) -> None:
        if self._keys.is_required and not self._shows_all_tenants:  # rows show cached and computed tokens of all tenants' requests
            self._send(
                reply,
                403,
                "message.html",
                message="Steps show requests of all tenants: open the router's admin port (--admin-port) for them.",
            )
            return
        worker = find_pod(path, self._router.table)
        if worker is None:
            self._send(reply, 404, "message.html", message="The router knows no such pod.")
            return
        picture, reason = await draw_schedule(worker)
        await self._send_page(reply, "schedule.html", pod=name_of(worker), picture=picture, reason=reason)

    async def _send_page(self, reply: Reply, template: str, **values: Any) -> None:
        """Send a page whose rendering takes milliseconds. A thread renders it, one page at a time: streams go on meanwhile."""
        async with self._rendering:
            page = await asyncio.to_thread(self._render, template, values)
        reply.send(200, page, _HEADERS, _HTML)

    def _send(self, reply: Reply, status: int, template: str, headers: Headers | None = None, **values: Any) -> None:
        reply.send(status, self._render(template, values), [*_HEADERS, *(headers or [])], _HTML)

    def _render(self, template: str, values: dict[str, Any]) -> bytes:
        common = {
            "service": self._router.config.service_name,
            "replica": self._replica,
            "policy": self._router.config.policy,
            "has_keys": self._keys.is_required,
            "page": template,
            "pages": _NAVIGATION,
        }
        return self._templates.get_template(template).render(common | values).encode()


def _page_number(query: bytes) -> int:
    """Return the `page` of a query, from 1; 1 for anything else."""
    text = parse_qs(query.decode("latin-1")).get("page", ["1"])[0]
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 4 else 1


def _find_cookie(request: Request, wanted: str) -> str:
    """Return the value of the cookie, or an empty string. Cookies of other applications on this host may have any form."""
    for name, value in request.headers:
        if name == b"cookie":
            for part in value.split(b";"):
                found, _, text = part.strip().partition(b"=")
                if found == wanted.encode():
                    return text.decode("latin-1")
    return ""


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{1000 * value:,.0f}"
