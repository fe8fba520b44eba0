"""The routers' reports (`/fairlead/demand`), and their sum for the whole service."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import msgspec

# Bounded, so that sums and sizes are finite: a report with another number is refused.
Count = Annotated[int, msgspec.Meta(ge=-(10**15), le=10**15)]
Number = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as one router sees it. Unknown rates and times are 0."""

    pod: str
    address: str
    usable: bool
    running: Count
    waiting: Count
    backlog_tokens: Number  # prompt tokens to compute, as the worker reports
    pending_tokens: Number  # of this router's requests that the worker has not started to answer
    step_seconds: Number
    max_running: Count
    pages_free: Count  # pages that are only cached count: they can be evicted
    pages_total: Count
    hit_tokens: Number  # prompt tokens that its cache saved recently
    unique_share: Number | None  # of its cached tokens, the share that no other worker holds


class RouterReport(msgspec.Struct, frozen=True, kw_only=True):
    """One router's answer. Decode it with `msgspec.json.decode`, which raises ValueError for any other page."""

    idle_seconds: Number
    active: Count  # requests, including waiting ones
    queued: Count
    queued_tokens: Number
    requests_per_second: Number
    prompt_tokens_per_second: Number
    cached_share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    answer_seconds: Number
    prefill_rate: Number  # tokens per second of one worker, last measured; 0: never
    workers: tuple[WorkerReport, ...]

    @property
    def idle(self) -> bool:
        return not self.active and not self.queued and not any(one.usable and (one.running or one.waiting) for one in self.workers)


@dataclass(frozen=True)
class Demand:
    """The sum over all routers."""

    complete: bool  # every router has answered: otherwise the demand is a lower bound
    idle_seconds: float
    active: int
    queued: int
    queued_tokens: float  # to compute: without the expected cache hits
    requests_per_second: float
    tokens_per_second: float  # to compute
    answer_seconds: float  # of one answer, from its first byte to its end
    prefill_rate: float  # of one worker; 0: never measured
    workers: tuple[WorkerReport, ...]  # usable ones: a draining worker accepts no requests
    backlog_tokens: float  # to compute: assigned to workers, or queued

    @classmethod
    def of(cls, reports: Iterable[RouterReport | None]) -> "Demand":
        """Add up the reports. None: a router that has not answered."""
        all_reports = list(reports)
        received = [report for report in all_reports if report is not None]
        prompts = sum(report.prompt_tokens_per_second for report in received)
        weights = [(report, report.prompt_tokens_per_second / prompts if prompts else 1 / len(received)) for report in received]
        fresh = 1.0 - sum(report.cached_share * weight for report, weight in weights)
        rates = [report.prefill_rate for report in received if report.prefill_rate > 0]
        queued = fresh * sum(report.queued_tokens for report in received)
        by_address: dict[str, list[WorkerReport]] = defaultdict(list)
        for report in received:
            for worker in report.workers:
                if worker.usable:
                    by_address[worker.address].append(worker)
        given = [max(max(one.backlog_tokens for one in seen), sum(one.pending_tokens for one in seen)) for seen in by_address.values()]
        return cls(
            complete=bool(received) and len(received) == len(all_reports),
            idle_seconds=min((0.0 if not report.idle else report.idle_seconds for report in received), default=0.0),
            active=sum(report.active for report in received),
            queued=sum(report.queued for report in received),
            queued_tokens=queued,
            requests_per_second=sum(report.requests_per_second for report in received),
            tokens_per_second=fresh * prompts,
            answer_seconds=max((report.answer_seconds for report in received), default=0.0),
            prefill_rate=fmean(rates) if rates else 0.0,
            workers=tuple(max(seen, key=lambda one: one.running + one.waiting) for seen in by_address.values()),
            backlog_tokens=queued + sum(given),
        )
