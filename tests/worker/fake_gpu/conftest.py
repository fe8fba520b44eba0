"""Torch on one thread for these tests, and a fake GPU for each."""

from collections.abc import Iterator

import pytest
from bench.gpu.fake.gpu import FakeGpu
from bench.gpu.fake.worker import fake_worker
from tests.models import one_thread

from fairlead_worker.execution import trial

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start-up trial takes as long as it takes on this machine."""
    monkeypatch.setattr(trial, "MAX_SECONDS", float("inf"))


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_worker() as made:
        yield made
