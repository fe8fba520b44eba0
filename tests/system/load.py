"""Steady load from clients that use the routers as behind a Service: any router, and another one if a connection is refused."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp

PEOPLE = 24
"""Number of distinct prompt prefixes, each some blocks long."""


@dataclass(frozen=True)
class Shape:
    """A kind of request and its share of the load. Stand-in workers obey the seconds; real ones are as fast as they are."""

    share: float
    stream: bool
    max_tokens: int
    token_seconds: float = 0.0
    prefill_seconds: float = 0.0


SHAPES = (Shape(0.5, True, 6, 0.02, 0.1), Shape(0.25, True, 12, 0.12, 0.1), Shape(0.25, False, 5, 0.02, 0.4))
"""Short streams, long streams, and whole answers."""


@dataclass
class Outcome:
    """What one client saw. `kind`: ok · refused (an error status) · cut (an error event) · broken (a stream that just ended) · reset (no
    answer) · hung (nothing for longer than any client should wait)."""

    kind: str = "running"
    status: int = 0
    pod: str = ""
    router: str = ""
    first: float | None = None
    """Seconds to the first byte of the answer."""
    gap: float = 0.0
    """The longest wait between two events of a stream, in seconds."""
    detail: str = ""


@dataclass
class Report:
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome.kind for outcome in self.outcomes)

    def of(self, kind: str) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.kind == kind]

    @property
    def worst_first(self) -> float:
        return max((outcome.first for outcome in self.outcomes if outcome.first is not None), default=0.0)

    @property
    def worst_gap(self) -> float:
        return max((outcome.gap for outcome in self.outcomes), default=0.0)

    def row(self) -> dict[str, Any]:
        """Return the figures for tables and JSON."""
        counts = self.counts
        firsts = sorted(outcome.first for outcome in self.outcomes if outcome.first is not None)
        return {
            "requests": len(self.outcomes),
            "ok": counts["ok"],
            "5xx": sum(1 for outcome in self.outcomes if outcome.status >= 500),
            "other_errors": sum(1 for outcome in self.of("refused") if outcome.status < 500),
            "ended_with_error_event": counts["cut"],
            "broken": counts["broken"],
            "reset": counts["reset"],
            "hung": counts["hung"],
            "first_byte_p50": round(firsts[len(firsts) // 2], 3) if firsts else None,
            "first_byte_worst": round(self.worst_first, 3),
            "gap_worst": round(self.worst_gap, 3),
        }


class Load:
    """Sends `rate` requests per second while the context is open. Leaving it waits for all of them, at most `patience` seconds each."""

    def __init__(self, routers: Sequence[str], rate: float, patience: float, shapes: Sequence[Shape] = SHAPES) -> None:
        self._routers, self._rate, self._patience, self._shapes = list(routers), rate, patience, shapes
        self.report = Report()
        self.open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def streams_at(self, key: str = "pod") -> Counter[str]:
        """Count running streams, by `pod` or by `router`."""
        return Counter(getattr(outcome, key) for outcome in self.report.of("running") if outcome.first is not None)

    async def __aenter__(self) -> "Load":
        # One connection for each request: a kept one that the server closes at the same moment is the client's own problem.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._driver = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._driver.cancel()
        await asyncio.gather(self._driver, return_exceptions=True)
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def _drive(self) -> None:
        began, sent = monotonic(), 0
        while True:
            due = int((monotonic() - began) * self._rate) - sent
            for _ in range(due):
                task = asyncio.create_task(self._one(random.choices(self._shapes, [shape.share for shape in self._shapes])[0]))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            sent += due
            await asyncio.sleep(0.5 / self._rate)

    async def _one(self, shape: Shape) -> None:
        outcome = Outcome()
        self.report.outcomes.append(outcome)
        body = {
            "prompt": f"person {random.randrange(PEOPLE):03d} " * 40 + str(random.random()),
            "stream": shape.stream,
            "max_tokens": shape.max_tokens,
            "token_seconds": shape.token_seconds,
            "prefill_seconds": shape.prefill_seconds,
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(self._patience):
                outcome.kind = await self._ask(outcome, body)
        except TimeoutError:
            outcome.kind = "hung"
        except (aiohttp.ClientError, ConnectionError) as error:
            outcome.kind, outcome.detail = "broken" if outcome.first is not None else "reset", repr(error)

    async def _ask(self, outcome: Outcome, body: dict[str, Any]) -> str:
        began = monotonic()
        routers = random.sample(self._routers, len(self._routers))
        while True:
            outcome.router = routers.pop()
            try:
                answer = await self._session.post(f"{outcome.router}/v1/completions", json=body)
                break
            except aiohttp.ClientConnectorError:
                if not routers:
                    raise
        async with answer:
            outcome.status, outcome.pod = answer.status, answer.headers.get("x-fairlead-pod", "")
            last = monotonic()
            outcome.first = last - began
            if answer.status != 200:
                outcome.detail = await answer.text()
                return "refused"
            if not body["stream"]:
                json.loads(await answer.read())
                return "ok"
            ended = ""
            async for line in answer.content:
                now = monotonic()
                outcome.gap, last = max(outcome.gap, now - last), now
                if line.startswith(b"data: [DONE]"):
                    ended = "ok"
                elif line.startswith(b"data:") and b'"error"' in line:
                    ended, outcome.detail = "cut", line.decode()
            outcome.gap = max(outcome.gap, monotonic() - last)
            return ended or "broken"
