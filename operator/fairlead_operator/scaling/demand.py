"""The routers' reports (`/fairlead/demand`), and their sum for the whole service."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

_MOST = 1e15
"""Largest number in a report."""


@dataclass(frozen=True)
class WorkerReport:
    """One worker, as one router sees it. Unknown rates and times are 0."""

    pod: str
    address: str
    usable: bool
    running: int
    waiting: int
    backlog_tokens: int  # prompt tokens to compute, as the worker reports
    pending_tokens: int  # of this router's requests that the worker has not started to answer
    step_seconds: float
    max_running: int
    pages_used: int  # by requests; pages that are only cached can be evicted
    pages_total: int
    hit_tokens: float  # prompt tokens that its cache saved recently
    unique_share: float | None  # of its cached tokens, the share that no other worker holds


@dataclass(frozen=True)
class RouterReport:
    """One router's answer."""

    idle_seconds: float
    active: int  # requests, including waiting ones
    queued: int
    queued_tokens: int
    requests_per_second: float
    prompt_tokens_per_second: float
    cached_share: float
    answer_seconds: float
    prefill_rate: float  # tokens per second of one worker, last measured; 0: never
    workers: tuple[WorkerReport, ...]

    @classmethod
    def parse(cls, page: Mapping[str, Any]) -> "RouterReport":
        """Parse a report. Raises ValueError, KeyError or TypeError for any other page."""
        return cls(
            idle_seconds=_number(page["idle_seconds"]),
            active=int(_number(page["active"])),
            queued=int(_number(page["queued"])),
            queued_tokens=int(_number(page["queued_tokens"])),
            requests_per_second=_number(page["requests_per_second"]),
            prompt_tokens_per_second=_number(page["prompt_tokens_per_second"]),
            cached_share=min(1.0, max(0.0, _number(page["cached_share"]))),
            answer_seconds=_number(page["answer_seconds"]),
            prefill_rate=_number(page["prefill_rate"]),
            workers=tuple(_worker(one) for one in page["workers"]),
        )

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


def _worker(one: Mapping[str, Any]) -> WorkerReport:
    share = one["unique_share"]
    return WorkerReport(
        pod=str(one["pod"]),
        address=str(one["address"]),
        usable=bool(one["usable"]),
        running=int(_number(one["running"])),
        waiting=int(_number(one["waiting"])),
        backlog_tokens=int(_number(one["backlog_tokens"])),
        pending_tokens=int(_number(one["pending_tokens"])),
        step_seconds=_number(one["step_seconds"]),
        max_running=int(_number(one["max_running"])),
        pages_used=int(_number(one["pages_total"])) - int(_number(one["pages_free"])),
        pages_total=int(_number(one["pages_total"])),
        hit_tokens=_number(one["hit_tokens"]),
        unique_share=None if share is None else _number(share),
    )


def _number(value: Any) -> float:
    """Return a finite number, so that sums and sizes are finite too. Raises ValueError or TypeError."""
    if not abs(value) <= _MOST:  # written so that nan is refused too
        raise ValueError(f"{value!r:.20} is not a number of at most {_MOST:g}")
    return float(value)
