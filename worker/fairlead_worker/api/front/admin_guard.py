"""Admin paths and web pages: no permission by CORS, and 403 for a page of another origin. A form's POST would otherwise change state."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from fairlead_common.http.origins import FOREIGN, is_foreign_to_admin
from fairlead_worker.api.errors import ApiError
from fairlead_worker.api.http import RequestContext
from fairlead_worker.api.routes.operation import Operation


class AdminGuard:
    """ASGI middleware in front of CORS. `operations`: those of the admin paths."""

    def __init__(self, app: ASGIApp, public: ASGIApp, operations: Iterable[Operation], pod: str) -> None:
        """`app` gets the requests for admin paths, and `public` the others: the same application behind CORS."""
        self._app, self._public, self._pod = app, public, pod
        paths = [each.path.partition("{") for each in operations]
        self._paths = frozenset(path for path, brace, _ in paths if not brace)
        self._prefixes = tuple(path for path, brace, _ in paths if brace)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (scope["path"] in self._paths or scope["path"].startswith(self._prefixes)):
            await self._public(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not is_foreign_to_admin(headers.get(b"origin"), headers.get(b"host", b"")):
            await self._app(scope, receive, send)
            return
        error = ApiError(403, FOREIGN, type="permission_error", code="forbidden_origin")
        await RequestContext(scope, receive, send, self._pod).respond_error(error)
