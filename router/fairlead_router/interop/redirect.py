"""`--forwarding-mode redirect`: the router answers 307 with the chosen worker's address, and the client streams from it directly.

The reservation lasts until the worker's load includes the request. The router does not see the answer: there are no retries, no circuit
breaker and no prediction audit. A worker that cannot accept the request answers 503, and the client retries at the router.
"""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Final

from fairlead_common.protocols.paths import RESPONSES
from fairlead_router.config import RouterConfig
from fairlead_router.errors import ApiError
from fairlead_router.request.client_request import OPT_OUT, Call
from fairlead_router.request.prompts import Prompt
from fairlead_router.routing.policies import Choice
from fairlead_router.serving.admission import Admission, Ticket
from fairlead_router.serving.attempts import Attempts
from fairlead_router.serving.proxy import Proxy

PENDING_SECONDS: Final = 1.0
"""Time that a redirected prompt counts as pending at its worker; afterwards the worker's own report includes it."""


class Redirect(ApiError):
    """307 to a worker. Its body tells clients that do not follow redirects what to do."""

    def __init__(self, location: bytes, choice: Choice) -> None:
        super().__init__(
            307,
            "This router redirects (--forwarding-mode redirect). Send the same request with its body to the Location, as RFC 9110 has it "
            "for 307, or give the header `X-Fairlead-Forwarding-Mode: proxy`.",
            kind="redirect",
            code="temporary_redirect",
            headers=[(b"location", location), (b"cache-control", b"no-store"), (b"x-fairlead-pod", choice.worker.pod.encode())],
        )
        if choice.predicted is not None:
            self.headers.append((b"x-fairlead-predicted-tokens", b"%d" % choice.predicted))


def has_opted_out(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request opts out of redirects. Header names are in lower case."""
    return any(name == OPT_OUT and value.strip().lower() == b"proxy" for name, value in headers)


def uses_stored_response(path: str, body: bytes) -> bool:
    """Return whether a request may store or continue a response. It is proxied, because only a router has the keys of stored responses."""
    return path == RESPONSES and (b'"store"' in body or b'"previous_response_id"' in body)


class Redirector:
    """Redirector that admits and routes requests as the proxy does, and returns the worker's address."""

    def __init__(self, config: RouterConfig, proxy: Proxy, admission: Admission) -> None:
        """Raises ValueError for redirects with API keys or classes: a client could return to a worker without the router's checks."""
        if config.forwarding_mode == "redirect" and config.api_keys_file:
            raise ValueError(
                "--forwarding-mode redirect goes past --api-keys-file, since workers check no keys: remove one of the two flags"
            )
        if config.forwarding_mode == "redirect" and config.slo_classes:
            raise ValueError("--forwarding-mode redirect goes past --slo-classes, which only routers apply: remove one of the two flags")
        self.is_enabled = config.forwarding_mode == "redirect"
        self._proxy, self._admission = proxy, admission

    async def redirect(self, call: Call, prompt: Prompt) -> Redirect:
        """Return the redirect of a request. Waits for a worker while there is none; raises ApiError 503 when that takes too long."""
        assert call.account is not None
        priority = call.caller.effective_priority(prompt.params.priority)
        ticket = Ticket(call.account, priority, prompt.prompt_tokens, call.reserved_bytes, request=prompt)
        try:
            choice = await self._proxy.choose(ticket, Attempts(), (), call.head.path)
        finally:
            self._admission.leave(ticket)
        worker, pending = choice.worker, max(0, prompt.prompt_tokens - (choice.predicted or 0))
        call.outcome.worker, call.outcome.predicted_tokens = worker.address, choice.predicted
        worker.begin_prompt(pending, monotonic())
        asyncio.get_running_loop().call_later(PENDING_SECONDS, worker.end_prompt, pending)
        return Redirect(b"http://" + worker.address.encode() + call.head.path.encode(), choice)
