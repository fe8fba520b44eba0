"""`--steering redirect`: a client inside the cluster is sent to the chosen worker (307), and streams from it without a proxy on the way.

The reservation stands until the worker's load shows the request. Nothing of a request's further way is seen here: no retries, no breaker,
no audit of predictions; a worker that cannot take it answers 503, and the client asks the router again.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError
from fairlead_router.fleet.workers import Worker
from fairlead_router.request.client_request import Call
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.policies import Choice
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.attempts import Attempts
from fairlead_router.serving.proxy import Proxy
from fairlead_router.serving.upstream_request import build_routing_request

OPT_OUT: Final = b"x-fairlead-steering"
"""`proxy` in this header: the client cannot follow redirects, its request is proxied."""
PENDING_SECONDS: Final = 1.0
"""How long a redirected prompt counts as its worker's backlog here: by then the worker's own report has it."""


class Redirect(ApiError):
    """307 to a worker. Its body says what to do to who does not follow it."""

    def __init__(self, location: bytes, choice: Choice) -> None:
        super().__init__(
            307,
            "This router redirects (--steering redirect). Send the same request with its body to the Location, as RFC 9110 has it for 307, "
            "or give the header `X-Fairlead-Steering: proxy`.",
            kind="redirect",
            code="temporary_redirect",
            headers=[(b"location", location), (b"cache-control", b"no-store"), (b"x-fairlead-pod", choice.worker.pod.encode())],
        )
        if choice.predicted is not None:
            self.headers.append((b"x-fairlead-predicted-tokens", b"%d" % choice.predicted))


def has_opted_out(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request asks to be proxied. Names in lower case."""
    return any(name == OPT_OUT and value.strip().lower() == b"proxy" for name, value in headers)


class Redirector:
    """Chooses and holds as the proxy does, and says where the worker is instead of going there."""

    def __init__(self, config: RouterConfig, proxy: Proxy, admission: Admission) -> None:
        """Raises ValueError for keys beside redirects: workers know no keys, and who was once sent to one could go again without."""
        if config.steering == "redirect" and config.api_keys_file:
            raise ValueError("--steering redirect goes past --api-keys-file, since workers check no keys: take one of the two away")
        self.is_enabled = config.steering == "redirect"
        self._proxy, self._admission = proxy, admission

    async def redirect(self, call: Call, prompt: Prompt) -> Redirect:
        """Where the call's client is to go. Waits for a worker while there is none; raises ApiError 503 when that took too long."""
        assert call.account is not None
        ticket = Ticket(call.account, call.caller.effective_priority(prompt.params.priority), prompt.length, call.reserved_bytes)
        try:
            choice = await self._proxy.choose(build_routing_request(prompt, call.caller, call.session), Attempts(), (), ticket)
        finally:
            self._admission.leave(ticket)
        worker, pending = choice.worker, max(0, prompt.length - (choice.predicted or 0))
        call.worker, call.predicted_tokens = worker.address, choice.predicted
        worker.pending_tokens += pending
        asyncio.get_running_loop().call_later(PENDING_SECONDS, _remove_pending, worker, pending)
        return Redirect(b"http://" + worker.address.encode() + call.path.encode(), choice)


def _remove_pending(worker: Worker, pending: int) -> None:
    worker.pending_tokens -= pending
