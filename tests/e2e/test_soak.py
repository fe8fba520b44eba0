"""`make soak` applies each kind of fault, and measures memory after the warm-up."""

import random
import threading
from typing import Any

import pytest
from e2e.soak import __main__ as program
from e2e.soak import memory
from e2e.soak.faults import OF_MEASURED, OF_OTHERS, Check, Faults, plan
from e2e.soak.memory import PERIOD, WARM_UP, MemoryLog, slope


def test_faults_of_measured_processes_come_first_and_every_kind_comes() -> None:
    planned = plan(30, OF_OTHERS, random.Random(1))
    assert len(planned) == 30
    assert set(planned[:10]) == set(OF_MEASURED) and set(planned[10:]) == set(OF_OTHERS)
    assert planned == plan(30, OF_OTHERS, random.Random(1)), "the same seed gives the same run"


def test_growth_while_a_process_warms_up_is_left_out() -> None:
    samples = [(at, 100 + at if at < WARM_UP else 160 + at / 360) for at in (PERIOD * number for number in range(60))]
    assert slope(samples) == pytest.approx(10.0), "10 MB an hour"
    assert slope(samples[:20]) is None, "too few samples"


class Recorder:
    """A service that records when it is awaited."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def wait_ready(self, replicas: int) -> None:
        self.events.append("awaited")


def test_readiness_counts_only_after_the_fault_has_shown() -> None:
    service = Recorder()

    def late(faults: Faults) -> Check:
        def has_shown() -> bool:
            service.events.append("looked")
            return len(service.events) == 2

        return has_shown

    assert program.apply_fault(late, Faults(service, random.Random(1))) == ""  # type: ignore[arg-type]
    assert service.events == ["looked", "looked", "awaited"]


def test_an_error_of_a_fault_is_reported_and_does_not_end_the_run() -> None:
    def broken(faults: Faults) -> Check:
        raise LookupError("no pod to kill")

    service = Recorder()
    assert program.apply_fault(broken, Faults(service, random.Random(1))) == "LookupError: no pod to kill"  # type: ignore[arg-type]
    assert service.events == []


def test_memory_is_sampled_on_after_an_unexpected_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PERIOD", 0.01)
    answers = threading.Semaphore(0)

    class System:
        namespace = models = "one"

        def get(self, *_: str, namespace: str) -> dict[str, Any]:
            answers.release()
            return {}  # without `items`

    service = Recorder()
    service.system = System()  # type: ignore[attr-defined]
    with MemoryLog(service):  # type: ignore[arg-type]
        for _ in range(7):  # more than one round of the three components
            assert answers.acquire(timeout=10), "the thread has ended"
