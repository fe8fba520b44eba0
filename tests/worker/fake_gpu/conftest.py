"""Torch on one thread for these tests, and a fake GPU for each."""

from collections.abc import Iterator

import pytest
from bench.gpu.fake.gpu import FakeGpu
from bench.gpu.fake.worker import fake_worker
from tests.models import one_thread

__all__ = ["one_thread"]


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    with fake_worker() as made:
        yield made
