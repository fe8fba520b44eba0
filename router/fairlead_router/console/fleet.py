"""The fleet as rows of figures, for the page and for its updates. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from fairlead_router.fleet.workers import Worker

MAX_PODS: Final = 1000
"""Pods of one answer, the busiest ones: at most 200 KB."""
MAX_NAME: Final = 80
MAX_RATE: Final = 1e9
"""Tokens per second. A sum of larger ones, which only a broken worker reports, would not be finite."""
COLUMNS: Final = (
    ("Pod", "text"),
    ("State", "text"),
    ("Running", "number"),
    ("Waiting", "number"),
    ("KV use", "share"),
    ("Hit rate", "share"),
    ("Prefill tokens/s", "number"),
)
"""Heading and format of each figure of a row."""


def describe_fleet(workers: Iterable[Worker]) -> dict[str, Any]:
    """Return `pods` (rows as in COLUMNS), `totals` and `omitted`, the number of pods beyond MAX_PODS."""
    known = list(workers)
    shown = sorted(known, key=lambda worker: -(worker.load.running + worker.load.waiting))[:MAX_PODS]
    return {
        "pods": sorted((_row(worker) for worker in shown), key=lambda row: str(row[0])),
        "totals": _totals(known),
        "omitted": len(known) - len(shown),
    }


def name_of(worker: Worker) -> str:
    """Return the pod's name, or its address before it reported one."""
    return (worker.pod or worker.address)[:MAX_NAME]


def _row(worker: Worker) -> list[Any]:
    load = worker.load
    rate = _share(*_prompt_tokens(worker))
    return [
        name_of(worker),
        _state(worker),
        load.running,
        load.waiting,
        _share(load.pages_total - load.pages_free, load.pages_total),
        rate,
        round(min(load.prefill_rate, MAX_RATE)),
    ]


def _totals(workers: list[Worker]) -> dict[str, Any]:
    loads = [worker.load for worker in workers]
    pages = sum(load.pages_total for load in loads)
    counted = [_prompt_tokens(worker) for worker in workers]
    return {
        "ready": sum(worker.usable for worker in workers),
        "pods": len(workers),
        "running": sum(load.running for load in loads),
        "waiting": sum(load.waiting for load in loads),
        "kv_use": _share(pages - sum(load.pages_free for load in loads), pages),
        "hit_rate": _share(sum(cached for cached, _ in counted), sum(prompt for _, prompt in counted)),
        "prefill_rate": round(sum(min(load.prefill_rate, MAX_RATE) for load in loads)),
    }


def _prompt_tokens(worker: Worker) -> tuple[int, int]:
    """Return cached and all prompt tokens since the worker's start; zeros if it does not report them."""
    return getattr(worker.load, "cached_tokens", 0) or 0, getattr(worker.load, "prompt_tokens", 0) or 0


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _state(worker: Worker) -> str:
    """Return the state in the words of `fairlead status`."""
    if worker.draining:
        return "Draining"
    return "NotReady" if not worker.ready or worker.silent else "Ready" if worker.usable else "Avoided"
