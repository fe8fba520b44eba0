"""How long a prompt waits at a worker: the one estimate of the score, the queue, service classes, `LeastLoad` and the simulator. Pure."""

from typing import Final

from fairlead_index.worker_load import WorkerLoad

USUAL_TOKENS: Final = 2048
NO_ROOM: Final = 1e9


def tokens_ahead(load: WorkerLoad, age: float, reserved: float = 0.0, sent: float = 0.0) -> float:
    """Return the prompt tokens that the worker computes before a new prompt.

    These are the reported ones less the work of the `age` seconds since, and those that routers have `reserved` after the report; at least
    those that this router has `sent` and that are not computed, as no report may show them yet.
    """
    return max(load.backlog_after(age) + reserved, sent)


def expected_ttft(load: WorkerLoad, ahead: float, tokens: float = 0.0) -> float:
    """Return the seconds until a prompt sent now has its first token: the prefill of `ahead` and of its own `tokens`, and a step.

    Without `tokens` it is the wait until the prompt begins.
    """
    return ahead / load.rate + tokens / load.rate + load.step_seconds


def ready_key(load: WorkerLoad, ahead: float, now: float) -> float:
    """Return when a usual prompt would have its first token, as of `now`, in seconds; without free KV pages for it after all others."""
    return now + expected_ttft(load, ahead, USUAL_TOKENS) + (0.0 if load.has_room(USUAL_TOKENS) else NO_ROOM)
