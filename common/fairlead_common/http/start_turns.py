"""Turns of clients to start requests, so that one with hundreds of connections does not delay another's by all of them."""

import asyncio
from collections import deque
from collections.abc import Callable

from fairlead_common.http.response import Headers

STARTS_PER_PASS, CONTENDED_STARTS, CONTENDED_SECONDS = 32, 8, 1.0
"""Requests that start in one iteration of the event loop; fewer while clients contend, and for so long after they last did.

Without a limit, those of thousands of connections make an iteration last seconds. More iterations cost CPU time: with a limit of four, 32
connections have 0.9 of the requests per second.
"""
ClientOf = Callable[[Headers], str]
"""Returns the client that the headers of a request name."""


class StartTurns:
    """Starts a bounded number of requests in each iteration of the event loop, one of each client after the other."""

    def __init__(self, client_of: ClientOf) -> None:
        self._client_of = client_of
        self._started = 0
        """Requests that started in this iteration."""
        self._most, self._contended_at = STARTS_PER_PASS, 0.0
        """Requests that may start in an iteration, and when clients last contended, by the loop's clock."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Requests that start in later iterations, by client: the client that is next first."""

    async def take(self, headers: Headers) -> None:
        """Return when the request with these headers may start: at once, unless too many others start in this iteration."""
        loop = asyncio.get_running_loop()
        if not self._started:
            loop.call_soon(self._end_pass)
        if self._started < self._most:
            self._started += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(self._client_of(headers), deque()).append(turn)
        await turn

    def _end_pass(self) -> None:
        loop = asyncio.get_running_loop()
        self._started = 0
        if len(self._waiting) > 1:
            self._most, self._contended_at = CONTENDED_STARTS, loop.time()
        elif self._most < STARTS_PER_PASS and loop.time() > self._contended_at + CONTENDED_SECONDS:
            self._most = STARTS_PER_PASS
        while self._waiting and self._started < self._most:
            client = next(iter(self._waiting))
            turns = self._waiting.pop(client)
            while turns and turns[0].done():  # its client has gone
                turns.popleft()
            if turns:
                turns.popleft().set_result(None)
                self._started += 1
            if turns:
                self._waiting[client] = turns
        if self._started:
            loop.call_soon(self._end_pass)
