"""The latest requests with the choices that were made for them, for the web console. Nothing of a prompt or an answer is kept."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
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

    number: int
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
    """A ring of MAX_REQUESTS records, and the prefixes of more requests."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS)
        self._count = 0
        self.prefixes = PrefixLog()

    def record(self, call: Call, now: float) -> None:
        """Store an ended request. `now`: monotonic seconds."""
        self._count += 1
        self.prefixes.record(call.caller.tenant.name, call.hashes)
        is_timed = call.held_stream is not None and call.first_byte_at is not None and call.chosen_at
        self._records.append(
            RequestRecord(
                self._count,
                time.time(),
                call.id,
                call.caller.tenant.name,
                call.path,
                call.model,
                call.class_name,
                call.worker,
                call.candidates,
                (call.first_byte_at or 0.0) - call.chosen_at if is_timed else None,
                call.predicted_tokens,
                call.cached_tokens,
                call.prompt_tokens,
                call.attempts,
                call.status,
                call.ending,
                now - call.started_at,
            )
        )

    def newest(self, tenant: str | None) -> Iterator[RequestRecord]:
        """Yield the records, the newest first. `tenant`: only this tenant's; None: all."""
        return (record for record in reversed(self._records) if tenant is None or record.tenant == tenant)
