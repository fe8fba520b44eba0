"""The latest requests with the choices that were made for them, for the web console. Nothing of a prompt or an answer is kept."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fairlead_index.score import StartEstimate
from fairlead_router.request.client_request import Call
from fairlead_router.request.prefix_log import PrefixLog

MAX_REQUESTS: Final = 200
"""Requests that are kept: at most 0.6 MB with 12 candidates each."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One ended request. Times are in seconds; None: unknown. `time_to_first_token`: from the choice, of streams only."""

    ended_at: float
    """Unix time."""
    id: str
    tenant: str
    path: str
    model: str
    class_name: str
    worker: str
    candidates: Sequence[StartEstimate]
    time_to_first_token: float | None
    predicted_tokens: int | None
    cached_tokens: int | None
    prompt_tokens: int | None
    attempts: int
    status: int
    ending: str
    seconds: float

    @property
    def chosen(self) -> StartEstimate | None:
        """The estimate for the chosen worker."""
        return next((start for start in self.candidates if start.address == self.worker), None)


class RequestLog:
    """The latest MAX_REQUESTS records, and the prefixes of more requests. A busy tenant pushes out its own records first."""

    def __init__(self) -> None:
        self._records: dict[str, deque[RequestRecord]] = {}  # by tenant
        self._count = 0
        self.prefixes = PrefixLog()

    def record(self, call: Call, now: float) -> None:
        """Store an ended request. `now`: monotonic seconds."""
        tenant = call.caller.tenant.name
        self.prefixes.record(tenant, call.outcome.hashes)
        is_timed = call.held_stream is not None and call.outcome.first_byte_at is not None and call.outcome.chosen_at > 0
        self._records.setdefault(tenant, deque()).append(
            RequestRecord(
                time.time(),
                call.head.id,
                tenant,
                call.head.path,
                call.outcome.model,
                call.class_name,
                call.outcome.worker,
                call.outcome.candidates,
                (call.outcome.first_byte_at or 0.0) - call.outcome.chosen_at if is_timed else None,
                call.outcome.predicted_tokens,
                call.outcome.cached_tokens,
                call.outcome.prompt_tokens,
                call.outcome.attempts,
                call.outcome.status,
                call.outcome.ending,
                now - call.head.started_at,
            )
        )
        self._count += 1
        if self._count > MAX_REQUESTS:
            largest = max(self._records, key=lambda name: len(self._records[name]))
            self._records[largest].popleft()
            self._count -= 1

    def newest(self, tenant: str | None) -> list[RequestRecord]:
        """Return the records, the newest first. `tenant`: only this tenant's; None: all."""
        chosen = self._records.values() if tenant is None else [self._records.get(tenant, ())]
        return sorted((record for records in chosen for record in records), key=lambda record: record.ended_at, reverse=True)
